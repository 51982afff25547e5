"""Several processes of one run, started by torchrun as a user starts them; none outlives its test."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests import CHECKOUT

# Two processes share this machine's cores: with a pool of threads each they would wait for each other.
QUIET = {"OMP_NUM_THREADS": "1", "HF_MPS_DEVICE": "cpu", "HF_MPS_SIMULATE": "0", "TOKENIZERS_PARALLELISM": "false"}


def launch(
    processes: int, *words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc_per_node processes *words`, on the CPU, and return it ended, with its text.

    Where it takes longer than `timeout` seconds, or the test is stopped, it and its processes are killed; each of these
    has a session of its own, so that no signal to a group reaches them all.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    return ended([started([*command, *map(str, words)], cwd, {**QUIET, **(env or {})})], timeout)[0]


def accelerate(file: Path, *words: str | Path, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch --config_file file *words` as `launch` runs torchrun."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        "--main_process_port",
        "0",
    ]
    return ended([started([*command, *map(str, words)], cwd, {**QUIET, **env})], 120)[0]


def file_on_page(name: str) -> str:
    """A configuration file as docs/several-machines.md shows it."""
    page = (CHECKOUT / "docs" / "several-machines.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"```yaml\n(# {re.escape(name)}\n.*?)```", page, re.DOTALL)
    return str(shown)


def python(
    *words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` as `launch` runs torchrun."""
    return ended([started([sys.executable, *map(str, words)], cwd, {**QUIET, **(env or {})})], timeout)[0]


def launch_hosts(
    hosts: int, *words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 120
) -> list[subprocess.CompletedProcess[str]]:
    """Run `torchrun --nnodes hosts --nproc_per_node 1 *words` as on each of several Macs, and return them ended.

    Each host's process has a simulated Metal device of its own, and like each Mac a folder for temporary files.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc_per_node", "1"]
    meeting = ["--master_addr", "127.0.0.1", "--master_port", str(port), "--node_rank"]
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}
    with ExitStack() as folders:
        macs = []
        for host in range(hosts):
            own = {"TMPDIR": folders.enter_context(tempfile.TemporaryDirectory())}
            macs.append(started([*command, *meeting, str(host), *map(str, words)], cwd, own | variables))
        return ended(macs, timeout)


def started(command: list[str], cwd: Path | None, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(processes: list[subprocess.Popen[str]], timeout: float) -> list[subprocess.CompletedProcess[str]]:
    """Wait for each and return it with its text; kill what is left of all of them with their own processes."""
    done = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                alive: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
                for one in (*alive, psutil.Process(process.pid)):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
                process.communicate()
    return done
