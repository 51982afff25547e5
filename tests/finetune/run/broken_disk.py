"""Processes on a disk that fails: a library of some lines of C (broken_disk.c) stands in for it, by LD_PRELOAD."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def library(folder: Path) -> dict[str, str]:
    """The variables that put a process on such a disk; the test is skipped where there is no compiler for it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    made = folder / "broken_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(made), "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(made), "TOKENIZERS_PARALLELISM": "false"}
