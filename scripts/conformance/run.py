"""The report's processes: one that captures the calls, and for each release some that run the cases.

A kernel that crashes its process, or does not return, is named with its case, and the rest goes on in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hf_mps.core.errors import RunError

COMMAND = "python scripts/conformance/report.py"
CHECKOUT = Path(__file__).resolve().parents[2]
WORKER = "scripts.conformance.worker"
PATIENCE = 300.0
"""Seconds that one case may take: PyTorch's largest kernels compile for some seconds each."""


class Wanted(NamedTuple):
    """Which cases: all, some operators', or one by its name; and how many processes run them at a time."""

    operators: tuple[str, ...] = ()
    case: str = ""
    jobs: int = 1
    quick: bool = False
    """One call of each operator, dtype and layout; of the integers int64 alone."""


class Task(NamedTuple):
    """What a worker is told: its share of the cases, those that are done, and where it notes what runs."""

    calls: str
    note: str
    share: int
    shares: int
    operators: tuple[str, ...]
    case: str
    quick: bool
    done: list[str]


@contextmanager
def samples(release: str | None) -> Iterator[Path]:
    """A file with PyTorch's samples as calls, for the block; beside it the workers' notes lie.

    They run on the release's kernels, so that what a forward pass leaves for its gradient is what a Mac's leaves; where
    a kernel ends the process, or without a release, on the simulated device's own. Raises RunError where that stops.
    """
    with tempfile.TemporaryDirectory(prefix="hf_mps-report-") as folder:
        file, errors = Path(folder) / "calls", Path(folder) / "errors"
        if release is None or _started(["capture", str(file)], release, errors).wait():
            _finished(_started(["capture", str(file)], None, errors), errors)
        yield file


def cases(release: str, calls: Path, wanted: Wanted) -> list[dict[str, Any]]:
    """Every case's outcome on a release.

    Raises:
        RunError: a worker cannot start, or stops for a reason that is no kernel's.
    """
    folder, jobs = calls.parent, wanted.jobs
    tasks = [
        Task(str(calls), str(folder / f"note-{share}"), share, jobs, *wanted[:2], quick=wanted.quick, done=[])
        for share in range(jobs)
    ]
    with ThreadPoolExecutor(jobs) as pool:
        return [one for share in pool.map(lambda task: _share(release, task, folder), tasks) for one in share]


def _share(release: str, task: Task, folder: Path) -> list[dict[str, Any]]:
    """One worker's cases, by as many processes as it takes."""
    found: list[dict[str, Any]] = []
    while True:
        file = folder / f"task-{task.share}"
        file.write_text(json.dumps(task._replace(done=[*task.done, *(one["name"] for one in found)])._asdict()))
        errors = folder / f"errors-{task.share}"
        process = _started(["run", str(file)], release, errors)
        seen, hung = _lines(process)
        found += seen
        code = process.wait()
        if code == 0:
            return [one for one in found if one["outcome"] != "no case"]
        if code > 0 and not hung:
            _finished(process, errors)
        found.append(_crash(release, Path(task.note), f"signal {-code}" if not hung else f"no end in {PATIENCE:.0f} s"))


def _lines(process: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], bool]:
    found: list[dict[str, Any]] = []
    hung = threading.Event()

    def stop() -> None:
        hung.set()
        process.kill()

    assert process.stdout is not None
    while True:
        timer = threading.Timer(PATIENCE, stop)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            return found, hung.is_set()
        if line.startswith("{") and line.endswith("}\n"):
            found.append(json.loads(line))


def _crash(release: str, note: Path, how: str) -> dict[str, Any]:
    name, kernel, *_ = [*note.read_text().splitlines(), "", ""]
    operator, dtype, layout, size, _ = name.split("/")
    return {
        **{"name": name, "rule": operator, "operator": operator, "form": "as named", "family": ""},
        **{"dtype": dtype, "layout": layout, "size": size, "kernels": [kernel] if kernel else []},
        # Before a kernel it was PyTorch's CPU kernel, on arguments that it does not check: that is no case.
        **{
            "outcome": "crash" if kernel else "no case",
            "detail": f"{how} in {kernel or 'no kernel'}",
            "elements": 0,
            "origin": "",
        },
        "reproduction": f"{COMMAND} {release} --case {name}",
    }


def _started(arguments: list[str], release: str | None, errors: Path) -> subprocess.Popen[str]:
    settings = {"HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": "quiet", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "HF_MPS_KERNELS"} | settings
    if release is not None:
        environment["HF_MPS_KERNELS"] = f"{release},checked"
    with errors.open("w") as written:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            env=environment,
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        )


def _finished(process: subprocess.Popen[str], errors: Path) -> None:
    """Raises RunError, with the last line that the process said, where it failed."""
    if process.wait():
        last = errors.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise RunError(f"the report's worker stopped: {last[0]}")
