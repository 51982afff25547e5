"""A run that is killed at any moment and goes on from its last checkpoint ends, to the last bit, as one never killed.

Simulated Metal that adds in one order (test_spread.py has the other), dropout on, rows shuffled, words hidden at
random. The moments are drawn at random, with a seed of their own: steps of the training, and the n-th thing that a
checkpoint writes, in the middle of the file.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import CHECKOUT, share

DRAW = random.Random(20261121)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.together,
    pytest.mark.skipif(sys.platform == "darwin", reason="a forked process cannot use a Mac's own device"),
]

WRITES = 18  # at least, of a checkpoint: files, fsyncs, the renaming
KILLS: dict[str, dict[str, Any]] = {
    "trainer": {"loop": "trainer", "kills": []},
    "accelerator": {"loop": "accelerator", "kills": []},
}
for _loop in ("trainer", "accelerator"):
    for _step in DRAW.sample(range(1, 17), 2):
        KILLS[f"{_loop}, step {_step}"] = {"loop": _loop, "kills": [("step", _step)]}
    for _write in DRAW.sample(range(1, 4 * WRITES), 3):
        KILLS[f"{_loop}, write {_write}"] = {"loop": _loop, "kills": [("write", _write)]}
    _twice = [("write", DRAW.randrange(WRITES, 3 * WRITES)), ("step", DRAW.randrange(2, 6))]
    KILLS[f"{_loop}, twice"] = {"loop": _loop, "kills": _twice}
if not share.is_whole():  # a step and a write of each loop; each night tries all
    KILLS = {
        name: scenario
        for loop in ("trainer", "accelerator")
        for kind in ("step", "write")
        for name, scenario in [
            (loop, KILLS[loop]),
            next((name, each) for name, each in KILLS.items() if name.startswith(f"{loop}, {kind}")),
        ]
    }
UNGUARDED = {"loop": "trainer", "kills": [("write", 7)], "without": ["atomic-checkpoint", "torn-checkpoint"]}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every scenario has run, in one process that forks a child for each part of each."""
    folder = tmp_path_factory.mktemp("killed")
    plan = {name: {"without": [], **scenario} for name, scenario in (*KILLS.items(), ("unguarded", UNGUARDED))}
    (folder / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.resume.worker", str(folder)],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # a pool of threads would not live on in a forked child
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def result(ended: Path, name: str) -> Any:
    assert (ended / f"{name}.status").read_text() == "0", (ended / "stderr.txt").read_text()
    return torch.load(ended / f"{name}.pt", weights_only=False, map_location="cpu")


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the last bit, whatever they are made of."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("name", [name for name, scenario in KILLS.items() if scenario["kills"]])
def test_it_ends_as_the_run_that_was_never_killed(name: str, ended: Path) -> None:
    whole, killed = result(ended, KILLS[name]["loop"]), result(ended, name)
    for part in ("weights", "optimizer", "logs", "best"):
        assert same(whole[part], killed[part]), f"{part} differ; it went on from {killed['from']}"
    assert killed["left"] == whole["left"], "the same files are left, and nothing half-written"


@pytest.mark.skipif(not share.is_whole(), reason="counts over all kills: each night")
def test_kills_fell_before_and_after_the_first_checkpoint_and_while_one_was_written(ended: Path) -> None:
    starts = {result(ended, name)["from"] for name, scenario in KILLS.items() if scenario["kills"]}
    assert len(starts) >= 4, starts
    hidden = [path for name in KILLS for found in result(ended, name)["found"] for path in found if ".saving-" in path]
    assert hidden, "no kill fell into the writing of a checkpoint"


@pytest.mark.parametrize("name", [name for name, scenario in KILLS.items() if scenario["kills"]])
def test_no_checkpoint_is_ever_torn(name: str, ended: Path) -> None:
    last = {"trainer": "trainer_state.json", "accelerator": "random_states_0.pkl"}[KILLS[name]["loop"]]
    for found in result(ended, name)["found"]:
        seen = [path for path in found if not path.startswith(".")]
        folders = {path for path in seen if Path(path).name.startswith("checkpoint") and path != "checkpoints"}
        assert {path for path in folders if "." not in Path(path).name} == {
            str(Path(path).parent) for path in seen if path.endswith(last)
        }
    assert result(ended, name)["said"] == []


def test_without_the_guards_half_a_checkpoint_ends_the_resumed_run(ended: Path) -> None:
    assert (ended / "unguarded.status").read_text() == "1"
    assert not (ended / "unguarded.pt").exists()
