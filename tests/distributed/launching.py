"""Several processes of one run, started by torchrun as a user starts them; none outlives its test."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

# Two processes share this machine's cores: with a pool of threads each they would wait for each other.
QUIET = {"OMP_NUM_THREADS": "1", "HF_MPS_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"}


def launch(
    processes: int,
    *words: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc_per_node processes *words`, on the CPU, and return it ended, with its text.

    Where it takes longer than `timeout` seconds, or the test is stopped, it and its processes are killed; each of these
    has a session of its own, so that no signal to a group reaches them all.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    process = subprocess.Popen(
        [*command, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **QUIET, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            alive: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
            for one in (*alive, psutil.Process(process.pid)):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
