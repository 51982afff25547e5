"""A run of two processes that is killed at any moment goes on and ends, to the last bit, as one never killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from safetensors.numpy import load_file

from hf_mps.core import checkpoint_files
from hf_mps.finetune.run.run_dir import STATE
from tests import CHECKOUT
from tests.distributed.agents import Agent, Ranks
from tests.distributed.launching import launch
from tests.distributed.test_faults import faulty, furnish, said
from tests.finetune.run_files import results
from tests.share import OnDemand, nightly_but

pytestmark = [
    pytest.mark.slow,
    pytest.mark.together,
    pytest.mark.skipif(sys.platform == "darwin", reason="a forked process cannot use a Mac's own device"),
]
WORDS = ("my.yaml", "training.save_strategy=steps", "training.save_steps=4", "training.logging_steps=1")
TWO = (*WORDS, "training.num_train_epochs=3", "training.ddp_timeout=5")
KILLS = {
    "a rank in a step": "SIGKILL@step 6@1",
    "a rank that is stopped": "SIGSTOP@step 6@1",
    "the main rank as it writes": "SIGKILL@write 6@0",
    "a rank as it writes": "SIGKILL@write 2@1",
    "a full disk at one": "FULL@write 1@1",
}
KEPT = ("a rank in a step", "the main rank as it writes", "two become one")
"""Those that `make test` tries; each night tries all."""
WORLDS = {"two become one": (2, 1), "one becomes two": (1, 2), "two become three": (2, 3)}
"""How many processes a run begins in, with 16 rows in a step, and goes on in."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, with what each of them trains from."""
    folder = tmp_path_factory.mktemp("going-on")
    furnish(folder)
    return folder


@pytest.fixture(scope="module")
def parts(place: Path, agent: Agent) -> dict[str, list[Ranks]]:
    """How each run's parts ended: `whole`, and for each kill one that is gone on with."""

    def run(name: str, faults: list[str], ranks: int = 2, words: tuple[str, ...] = TWO) -> list[Ranks]:
        return [faulty(agent, place, name, ranks, fault, words) for fault in faults]

    def parts_of(name: str) -> list[Ranks]:
        if name == "whole":
            return run(name, ["none@never"])
        if name in KILLS:
            return run(name, [KILLS[name], "none@never"])
        still = (*WORDS, "model=still", "training.num_train_epochs=3")
        if name == "without dropout":
            return run(name, ["none@never"], words=still)
        first, second = WORLDS[name]
        batch = f"training.per_device_train_batch_size={16 // first}"
        begun = run(name, ["SIGKILL@step 6@0"], first, (*still, batch))
        return [*begun, *run(name, ["none@never"], second, (*still, batch))]

    return OnDemand(parts_of)


def end(run: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """A run's weights, bit by bit, and what it logged, without timings."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_f1")
    logs = [{key: entry[key] for key in kept if key in entry} for entry in results(run)["log_history"]]
    weights = {name: value.tobytes() for name, value in load_file(run / "model.safetensors").items()}
    return weights, [entry for entry in logs if len(entry) > 1]


@pytest.mark.parametrize("name", nightly_but(KEPT, KILLS))
def test_it_ends_as_the_run_that_was_never_killed(name: str, place: Path, parts: dict[str, list[Ranks]]) -> None:
    _, (first, second) = parts["whole"], parts[name]
    assert 0 not in first.codes
    assert second.codes == [0, 0], second.texts
    assert end(place / name.replace(" ", "-")) == end(place / "whole")


@pytest.mark.parametrize("name", nightly_but(KEPT, KILLS))
def test_no_checkpoint_is_torn_and_nothing_is_left(name: str, place: Path, parts: dict[str, list[Ranks]]) -> None:
    run = place / name.replace(" ", "-")
    for folder in run.glob("checkpoint-*"):
        assert checkpoint_files.torn(folder, STATE) is None
        assert {file.name for file in folder.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("name", nightly_but(KEPT, [name for name, (_, after) in WORLDS.items() if after != 3]))
def test_another_number_of_processes_goes_on_with_the_rows_that_are_left(
    name: str, place: Path, parts: dict[str, list[Ranks]]
) -> None:
    _, (first, second) = parts["without dropout"], parts[name]
    assert -9 in first.codes
    assert set(second.codes) == {0}, second.texts
    whole, changed = (end(place / run)[1] for run in ("without-dropout", name.replace(" ", "-")))
    assert len(whole) == len(changed)
    for one, other in zip(whole, changed, strict=True):  # without dropout all numbers hang on the rows of the steps
        assert other == pytest.approx(one, abs=1e-5)


@pytest.mark.nightly
def test_what_changed_is_said(place: Path, parts: dict[str, list[Ranks]]) -> None:
    texts = {name: parts[name][1].texts[0] for name in WORLDS}
    chosen = {name: results(place / name.replace(" ", "-"))["choices"]["processes"] for name in list(WORLDS)[:2]}
    assert chosen == snapshot(
        {
            "two become one": {
                "value": 1,
                "reason": "the run began in 2 processes, with 16 rows in a step; each has 2 batches of 8 now, so that"
                " the same rows are left; random draws (dropout) are others",
            },
            "one becomes two": {
                "value": 2,
                "reason": "the run began in 1 process, with 16 rows in a step; each has a batch of 8 now, so that the"
                " same rows are left; random draws (dropout) are others",
            },
        }
    )
    assert all("processes  " in texts[name] for name in chosen)
    assert texts["two become three"].splitlines()[-1] == snapshot(
        "hf-mps: two-become-three: the run began in 2 processes, with 16 rows in a step, which 3 processes cannot"
        " share; allowed: 1, 2, 4, 8, 16 processes; next: one of these numbers, or --fresh"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_torchrun_starts_the_ranks_again_where_one_was_killed_or_stopped(
    signal: str, place: Path, parts: dict[str, list[Ranks]]
) -> None:
    assert parts["whole"]
    run = ("-m", "tests.distributed.faulty", f"{signal}@step 6@1", *TWO, f"output_dir=again-{signal}")
    env = {"PYTHONPATH": str(CHECKOUT), "HF_DATASETS_CACHE": str(place / "cache")}
    ended = launch(2, "--max-restarts", "1", "--shutdown-timeout", "3", *run, cwd=place, env=env, timeout=400)
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("hf-mps: ")]
    assert line.startswith("hf-mps: another process of this run has ended, or its machine does not answer (")
    assert line.endswith(f"; kept: again-{signal}/checkpoint-4")
    assert "this recipe's run goes on from checkpoint-4" in ended.stdout
    assert end(place / f"again-{signal}") == end(place / "whole")


@pytest.mark.nightly
def test_the_ranks_of_a_torchrun_that_was_killed_end_too(place: Path) -> None:
    fault = ("-m", "tests.distributed.faulty", "launcher:SIGKILL@step 6@1", "my.yaml", "output_dir=orphaned")
    env = {"PYTHONPATH": str(CHECKOUT), "HF_DATASETS_CACHE": str(place / "cache")}
    ended = launch(2, *fault, "training.num_train_epochs=2000", cwd=place, env=env, timeout=300)
    assert ended.returncode == -9
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("hf-mps: ")]
    assert line.startswith("hf-mps: another process of this run has ended, or its machine does not answer")
    assert "Traceback" not in ended.stderr


@pytest.mark.nightly
def test_the_rank_that_could_not_write_is_named(parts: dict[str, list[Ranks]]) -> None:
    first, _ = parts["a full disk at one"]
    (line,) = said(first)
    assert line.startswith("hf-mps: rank 1 on HOST: no space is left on the disk")
