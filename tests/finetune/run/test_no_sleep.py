"""A Mac does not go to sleep while a run goes on, and nothing is left of what keeps it awake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hf_mps.finetune.features.machine import awake, can_stay_awake
from hf_mps.metal.device import machine
from tests.finetune.tiny import Command

MAC = machine.Machine(system="Darwin", processor="arm64", chip="Apple M2 Pro", memory=16 << 30, macos="15.6")
PC = machine.Machine(system="Linux", processor="x86_64", chip="x", memory=16 << 30)
# Says how it was called, and stays until it is ended.
FAKE = """#!{python}
import os, sys, time
with open({log!r}, "a") as file:
    file.write(" ".join([str(os.getpid()), str(os.getpgrp()), *sys.argv[1:]]) + "\\n")
time.sleep(60)
"""


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for macOS's program on the PATH of a pretended Mac; the file tells its calls."""
    log, folder = tmp_path / "calls", tmp_path / "bin"
    folder.mkdir()
    program = folder / "caffeinate"
    program.write_text(FAKE.format(python=sys.executable, log=str(log)), encoding="utf-8")
    program.chmod(0o755)
    before = machine.present()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        machine.override(MAC)
        yield log
    machine.override(before)


def called(log: Path) -> list[str]:
    """The words of the only call, once it has been made: its process, its group, its arguments."""
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text(encoding="utf-8").endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    (line,) = log.read_text(encoding="utf-8").splitlines()
    return line.split()


def gone(process: int) -> bool:
    """Whether no such process is left."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_sleep_is_held_off_until_the_run_ends_or_fails(caffeinate: Path) -> None:
    with pytest.raises(KeyboardInterrupt), awake():  # noqa: PT012  what is started ends with the context
        process, group, *arguments = called(caffeinate)
        assert arguments == ["-is", "-w", str(os.getpid())]
        assert group == process != str(os.getpgrp())  # a Ctrl-C in the terminal does not reach it
        assert not gone(int(process))
        raise KeyboardInterrupt
    assert gone(int(process))


def test_one_that_has_ended_already_is_no_failure(caffeinate: Path) -> None:
    with awake():
        os.kill(int(called(caffeinate)[0]), signal.SIGKILL)


def test_a_run_holds_sleep_off_and_says_so(desk: Path, finetune: Command, caffeinate: Path) -> None:
    ended = finetune("my.yaml", "training.max_steps=1").finished()
    assert "caffeinate -is, until the run ends" in ended.out
    assert gone(int(called(caffeinate)[0]))


def test_other_machines_have_no_such_program(caffeinate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.override(PC)
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=AssertionError("started")))
    with awake():
        assert not can_stay_awake()
