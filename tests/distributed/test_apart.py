"""Hosts that share no folder: the main one's has all of the run, and the others get from it what they go on from."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed.agents import Agent, Ranks
from tests.distributed.test_faults import faulty, furnish, said
from tests.distributed.test_going_on import end
from tests.finetune.run_files import results

pytestmark = [
    pytest.mark.slow,
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
    folder = tmp_path_factory.mktemp("apart")
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


def test_one_line_says_what_was_sent(place: Path, killed: list[Ranks]) -> None:
    _, second, _ = killed
    main, other = second.texts
    (line,) = [" ".join(line.split()) for line in main.splitlines() if "was sent" in line]
    assert "checkpoint-6 (" in line
    assert ") was sent to mac-1 in " in line
    assert "was sent" not in other


def test_every_rank_s_part_is_in_the_main_host_s_checkpoints(place: Path, killed: list[Ranks]) -> None:
    folders = list((place / "mac-0" / "killed").glob("checkpoint-*"))
    assert {folder.name for folder in folders} == {"checkpoint-3", "checkpoint-9"}
    for folder in folders:
        assert {file.name for file in folder.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_the_other_host_keeps_nothing(place: Path, killed: list[Ranks]) -> None:
    assert {path.name for path in (place / "mac-1").iterdir()} == {"dev.csv", "model", "my.yaml", "train.csv"}


def test_all_end_with_the_best_weights_though_one_host_has_them(place: Path, killed: list[Ranks]) -> None:
    shared, own = place / "shared", place / "mac-0" / "killed"
    first, *_, last = [entry for entry in end(shared)[1] if "eval_loss" in entry]
    assert first["eval_f1"] >= last["eval_f1"]
    assert first["eval_loss"] != last["eval_loss"]
    assert results(own)["metrics"]["loss"] == first["eval_loss"]
    assert (own / "predictions.csv").read_text() == (shared / "predictions.csv").read_text()


def test_the_other_host_s_line_says_where_the_checkpoints_are(place: Path, killed: list[Ranks]) -> None:
    first, *_ = killed
    assert [line for line in said(first) if "rank 1" in line], first.texts


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ((), "this recipe's run in away is finished on mac-1, and mac-0, the main host now, has none of it; next: "),
        (("results.json",), "away holds checkpoint-9 on mac-1, and mac-0, the main host now, has none of it; next: "),
    ],
    ids=["finished", "unfinished"],
)
def test_a_run_does_not_begin_again_in_silence_where_the_hosts_changed_places(
    left: tuple[str, ...], said: str, place: Path, killed: list[Ranks], agent: Agent
) -> None:
    away = place / "mac-1" / "away"
    shutil.copytree(place / "mac-0" / "killed", away)
    for name in left:
        (away / name).unlink()
    try:
        ended = faulty(agent, place, "away", 2, "none@never", WORDS, own=True)
    finally:
        shutil.rmtree(away)
        shutil.rmtree(place / "mac-0" / "away", ignore_errors=True)
    assert ended.codes == [2, 2], ended.texts
    (line,) = [line for text in ended.texts for line in text.splitlines() if "main host now" in line]
    assert said in line
    assert line.endswith(
        "let mac-1 be the main one (--node_rank 0, --machine_rank 0), bring its folder here, or --fresh"
    )


def test_checkpoints_in_parts_are_refused_where_no_folder_is_shared(place: Path, agent: Agent) -> None:
    ended = faulty(agent, place, "parts", 2, "none@never", (*WORDS, "training.fsdp=true"), own=True)
    assert ended.codes == [2, 2], ended.texts
    assert (
        "FSDP writes checkpoints of all ranks into one folder, and parts of mac-0 is none of mac-1;" in ended.texts[0]
    )
    assert "next: an output_dir that all hosts share, or training.save_strategy=no" in ended.texts[0]


def test_a_finished_run_is_said_to_be_one_where_it_is_not(place: Path, killed: list[Ranks]) -> None:
    *_, again = killed
    assert again.codes == [0, 0], again.texts
    assert "holds this recipe's finished run" in again.texts[0]
