"""What `make test` repeats at its very end: the tests that failed, and the one in which a part's process ended.

Parts of the suite run beside each other, so a failure is far from the end of what they print; and where a process is
killed, or waits for ever inside C++ code, no summary names the test.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import pytest

FOLDER = "TEST_LAST_WORDS"
"""The environment variable with the folder for them, which the Makefile sets and prints."""


class LastWords:
    """A file of this process: lines of what failed, and a last one of the test that runs."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = file.open("w", encoding="utf-8")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        end = self._file.tell()
        self._write(f"did not end: {nodeid}\n")
        self._file.seek(end)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed(report, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._failed(report, report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self._file.truncate()

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _failed(self, report: pytest.TestReport | pytest.CollectReport, nodeid: str) -> None:
        if report.failed:
            self._file.truncate()
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write(f"failed: {nodeid}: {crash.message.partition(os.linesep)[0] if crash else ''}\n")

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()


def keep(config: pytest.Config) -> None:
    """Write them where somebody asks for them. Processes that a test starts are asked for none."""
    folder = os.environ.pop(FOLDER, "")
    if folder:
        config.pluginmanager.register(LastWords(Path(folder) / f"{os.getpid()}.txt"))
