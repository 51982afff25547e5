"""A Metal device is one process's of a run, though each of several agents on this host started one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOLDER = """
import sys
from hf_mps.distributed.metal.claim import claim
from hf_mps.distributed.world import World
claim(World.here())
print("has it", flush=True)
sys.stdin.read()
"""
SCRIPT = "import accelerate; accelerate.Accelerator(); print('went on')"
LIGHTNING = """
import os, lightning as L, pytorch_lightning as pl
several = {"num_nodes": 2, "strategy": "ddp"}
def tried(make):
    try:
        make()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
tried(lambda: L.Trainer(logger=False, **several))
tried(lambda: pl.Trainer(logger=False))
tried(lambda: L.Fabric(**several).launch())
for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)  # no launcher: Lightning reads NODE_RANK
tried(lambda: L.Trainer(logger=False, **several))
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Those of the first of two agents, each of which counts one process here."""
    meeting = {"MASTER_ADDR": "mac-0", "MASTER_PORT": "29500", "TMPDIR": str(tmp_path)}
    return meeting | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0", "GROUP_RANK": "0"}


@pytest.fixture
def held(variables: dict[str, str]) -> Iterator[int]:
    """The process of rank 0, which has the device."""
    words = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "has it\n"
        yield holder.pid
        holder.kill()


def claimed(variables: dict[str, str], **others: str) -> str:
    """What a process says that claims the device too."""
    words = [sys.executable, "-c", HOLDER]
    done = subprocess.run(words, env=variables | others, input="", capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def test_another_process_of_the_same_run_is_refused_in_one_line(held: int, variables: dict[str, str]) -> None:
    said = claimed(variables, RANK="1", GROUP_RANK="1")
    assert said.endswith(
        f"rank 0 (process {held}) of this run has this host's one Metal device, and rank 1 of 2 on host 1 of 2 was"
        " started here too; next: one process on each Mac (--nnodes is the number of Macs), or HF_MPS_DEVICE=cpu for"
        " several processes on the CPU"
    )


def test_another_run_and_another_mac_are_not_asked(held: int, variables: dict[str, str], tmp_path: Path) -> None:
    (other := tmp_path / "another mac").mkdir()
    assert claimed(variables, RANK="1", MASTER_PORT="29501") == "has it"
    assert claimed(variables, RANK="1", TMPDIR=str(other)) == "has it"


def test_a_process_that_was_killed_has_nothing(variables: dict[str, str], tmp_path: Path) -> None:
    words = [sys.executable, "-c", f"{HOLDER.replace('sys.stdin.read()', 'import os; os.kill(os.getpid(), 9)')}"]
    subprocess.run(words, env=variables, capture_output=True, check=False)
    assert len(list(tmp_path.rglob("*.lock"))) == 1
    assert claimed(variables, RANK="1") == "has it"
    assert list(tmp_path.rglob("*.lock")) == []


def test_an_unchanged_script_is_refused_before_it_waits_for_others(
    held: int, variables: dict[str, str], run_python: object
) -> None:
    done = run_python("-c", SCRIPT, env=variables | {"RANK": "1", "GROUP_RANK": "1"})  # type: ignore[operator]
    assert done.returncode != 0
    assert "of this run has this host's one Metal device" in done.stderr.splitlines()[-1]


def test_lightning_is_refused_too_by_any_name_and_without_a_launcher(
    held: int, variables: dict[str, str], run_python: object
) -> None:
    own = {"RANK": "1", "GROUP_RANK": "1", "NODE_RANK": "1"}
    done = run_python("-c", LIGHTNING, env=variables | own)  # type: ignore[operator]
    refused = (
        f"UserError: rank 0 (process {held}) of this run has this host's one Metal device, and rank 1 of 2 on host"
    )
    assert [line[: len(refused)] for line in done.stdout.splitlines()] == [refused] * 4, done.stderr


@pytest.mark.parametrize("planted", ["link", "open folder"])
def test_what_somebody_else_planted_for_the_lock_is_not_followed(
    variables: dict[str, str], tmp_path: Path, planted: str
) -> None:
    place, elsewhere = tmp_path / f"hf_mps-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if planted == "link":
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        place.chmod(0o777)
    assert claimed(variables).endswith(
        "where the processes of a run keep a lock; next: remove that folder, or TMPDIR=FOLDER"
    )
    assert [*elsewhere.iterdir(), *place.iterdir()] == []
