"""A run's data loaders have workers: the run ends when they do not, and says so where one of them was killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from tests.distributed.launching import python

RUN = """
import multiprocessing, os, signal, sys
from hf_mps.cli.main import main
from hf_mps.finetune.run import callbacks

def kills(self, args, state, control, **_):
    if state.global_step == int(sys.argv[1]):
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

callbacks.OwnDraws.on_step_begin = kills
sys.exit(main(["finetune", "my.yaml", "training.dataloader_num_workers=2", *sys.argv[2:]]))
"""


def run(kill_at: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The desk's recipe with two workers, one of them killed before that step."""
    return python("-c", RUN, str(kill_at), *words, timeout=60)


@pytest.mark.process
def test_a_killed_worker_ends_the_run_in_one_line_with_its_checkpoints(desk: Path) -> None:
    ended = run(3, "training.save_strategy=steps", "training.save_steps=2", "training.per_device_train_batch_size=2")
    assert ended.returncode == 1
    line = ended.stderr.splitlines()[-1]
    cause, _, kept = line.partition("; kept: ")
    assert cause == snapshot(
        "hf-mps: a worker of the data loader was ended by SIGKILL, as by a system short of memory; next: the same"
        " command, or fewer training.dataloader_num_workers"
    )
    assert kept.startswith("runs/my/checkpoint-2")
    assert "Traceback" not in ended.stderr


@pytest.mark.nightly
@pytest.mark.process
def test_a_run_whose_workers_persist_ends(desk: Path) -> None:
    ended = run(-1, "training.dataloader_persistent_workers=true", "training.max_steps=2")
    assert ended.returncode == 0, ended.stderr
    assert (desk / "runs/my/results.json").is_file()
