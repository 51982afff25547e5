"""Hosts that share no folder: each keeps its own, and a run goes on only where they hold the same state of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.distributed.agents import Agent, Ranks
from tests.distributed.test_faults import LOST, faulty, furnish, said
from tests.distributed.test_going_on import end
from tests.finetune.run_files import results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform == "darwin", reason="a forked process cannot use a Mac's own device"),
]
# Steps so wide that the last weights are not the best: these are in the main host's folder alone.
SETTINGS = {
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "num_train_epochs": 3,
    "load_best_model_at_end": "true",
    "metric_for_best_model": "f1",
    "logging_steps": 1,
}
WORDS = ("my.yaml", *(f"training.{key}={value}" for key, value in SETTINGS.items()))
KILLED = "SIGKILL@step 8@1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are: in `shared` both ranks have one folder, else each has its own."""
    folder = tmp_path_factory.mktemp("hosts")
    furnish(folder)
    return folder


@pytest.fixture(scope="module")
def killed(place: Path, agent: Agent) -> list[Ranks]:
    """How the parts of a run ended: killed, gone on with, and asked for once more; one that is never killed beside."""
    faulty(agent, place, "shared", 2, "none@never", WORDS)
    return [faulty(agent, place, "killed", 2, fault, WORDS, own=True) for fault in (KILLED, "none@never", "none@never")]


def test_a_killed_run_goes_on_and_ends_as_one_never_killed(place: Path, killed: list[Ranks]) -> None:
    first, second, _ = killed
    assert 0 not in first.codes
    assert second.codes == [0, 0], second.texts
    assert end(place / "mac-0" / "killed") == end(place / "shared")


def test_each_host_keeps_its_checkpoints_and_the_model(place: Path, killed: list[Ranks]) -> None:
    for host, rank in (("mac-0", 0), ("mac-1", 1)):
        folders = list((place / host / "killed").glob("checkpoint-*"))
        assert {folder.name for folder in folders} == {"checkpoint-3", "checkpoint-9"}
        for folder in folders:
            assert [file.name for file in folder.glob("rng_state*")] == [f"rng_state_{rank}.pth"]
        assert not list((place / host / "killed").glob(".*"))
    first, second = (load_file(place / host / "killed" / "model.safetensors") for host in ("mac-0", "mac-1"))
    assert {name: value.tobytes() for name, value in first.items()} == {
        name: value.tobytes() for name, value in second.items()
    }


def test_the_choice_of_the_folder_says_that_each_host_keeps_its_own(place: Path, killed: list[Ranks]) -> None:
    output = results(place / "mac-0" / "killed")["choices"]["output"]
    assert output["reason"].endswith("the hosts share no folder, so each keeps checkpoints and model")


def test_all_end_with_the_best_weights(place: Path, killed: list[Ranks]) -> None:
    shared, own = place / "shared", place / "mac-0" / "killed"
    first, *_, last = [entry for entry in end(shared)[1] if "eval_loss" in entry]
    assert first["eval_f1"] >= last["eval_f1"]
    assert first["eval_loss"] != last["eval_loss"]
    assert results(own)["metrics"]["loss"] == first["eval_loss"]
    assert (own / "predictions.csv").read_text() == (shared / "predictions.csv").read_text()


def test_one_line_says_that_a_rank_was_lost(killed: list[Ranks]) -> None:
    first, *_ = killed
    (line,) = said(first)
    assert line.startswith(f"hf-mps: {LOST} (")
    assert line.endswith("; kept: killed/checkpoint-3, killed/checkpoint-6")


def another_step(here: Path, there: Path) -> None:
    shutil.rmtree(there / "checkpoint-9")


def another_file(here: Path, there: Path) -> None:
    (there / "checkpoint-9" / "added_tokens.json").write_text("{}")


def another_training(here: Path, there: Path) -> None:
    state = there / "checkpoint-9" / "trainer_state.json"
    content = json.loads(state.read_text())
    next(entry for entry in content["log_history"] if "loss" in entry)["loss"] += 1
    state.write_text(json.dumps(content))


def another_order(here: Path, there: Path) -> None:
    aside = (here / "checkpoint-9").rename(here / "aside")
    (there / "checkpoint-9").rename(here / "checkpoint-9")
    aside.rename(there / "checkpoint-9")


def nothing(here: Path, there: Path) -> None:
    shutil.rmtree(here)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_step, "changed holds checkpoint-9 on mac-0 and holds checkpoint-3 on mac-1"),
        (another_file, "changed holds checkpoint-9, which differs on mac-0 and mac-1 (added_tokens.json)"),
        (another_training, "changed holds checkpoint-9, which differs on mac-0 and mac-1 (logged losses)"),
        (another_order, "changed holds checkpoint-9, which lacks the files of rank 0 on mac-0"),
        (nothing, "changed holds nothing of this run on mac-0 and holds checkpoint-9 on mac-1"),
    ],
)
def test_hosts_that_hold_different_states_are_refused_in_one_line(
    change: Callable[[Path, Path], None], words: str, place: Path, killed: list[Ranks], agent: Agent
) -> None:
    folders = [place / host / "changed" for host in ("mac-0", "mac-1")]
    try:
        for folder in folders:
            shutil.copytree(folder.with_name("killed"), folder)
            for name in ("results.json", "config.json"):
                (folder / name).unlink(missing_ok=True)
        change(*folders)
        ended = faulty(agent, place, "changed", 2, "none@never", WORDS, own=True)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    assert ended.codes == [2, 2], ended.texts
    (line,) = [line for text in ended.texts for line in text.splitlines() if line.startswith("hf-mps: ")]
    assert line.startswith(f"hf-mps: {words}; next: start the hosts in the same order as before (--node_rank), ")


def test_checkpoints_in_parts_are_refused_where_no_folder_is_shared(place: Path, agent: Agent) -> None:
    ended = faulty(agent, place, "parts", 2, "none@never", (*WORDS, "training.fsdp=true"), own=True)
    assert ended.codes == [2, 2], ended.texts
    (line,) = [line for text in ended.texts for line in text.splitlines() if line.startswith("hf-mps: ")]
    assert line == (
        "hf-mps: FSDP writes the checkpoints of all ranks into one folder, and the hosts do not share parts; next: an"
        " output_dir that all hosts share, or training.save_strategy=no"
    )


def test_a_finished_run_is_said_to_be_one_where_it_is_not(place: Path, killed: list[Ranks]) -> None:
    *_, again = killed
    assert again.codes == [0, 0], again.texts
    assert "holds this recipe's finished run" in again.texts[0]
