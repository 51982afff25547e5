"""`pytest --known-failures FILE`: the tests that fail on Metal, with their exceptions; a run that differs ends red.

A line has an exception's type and a test's id with white space between, as kornia's list has them (kornia#4159); a line
that begins with # is a comment:

    TypeError  tests/test_geometry.py::test_inverse[mps-float64]

A failure that is not listed fails. So does a listed test that passes or raises anything else, and an id that no longer
names a test of a collected file, or names a file that is gone. A listed test that is skipped stays skipped.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OPTION, UPDATE = "--known-failures", "--known-failures-update"
MISSING = "hf_mps_known_failures_missing"
HEADER = "# Tests that fail on Metal: an exception's type and a test's id (pytest --known-failures=FILE, of hf_mps).\n"


@dataclass(frozen=True)
class Entry:
    """A listed failure: the exception's type by name, the test's id, and FILE:LINE."""

    exception: str
    test: str
    place: str


def add_options(group: pytest.OptionGroup) -> None:
    """Add --known-failures and --known-failures-update."""
    told = "tests that must fail, each with the type of its exception (a line: TYPE TEST_ID); may be repeated"
    group.addoption(OPTION, action="append", default=[], metavar="FILE", help=told)
    group.addoption(UPDATE, action="store_true", help=f"write what failed in this run into the file of {OPTION}")


def configure(config: pytest.Config) -> None:
    """Register the check where the option is given. Raises pytest.UsageError where a file cannot be read."""
    given, update = config.getoption(OPTION), config.getoption(UPDATE)
    if update and len(given) != 1:
        raise pytest.UsageError(f"{UPDATE}: needs one {OPTION}=FILE, and {len(given)} are given")
    if given:
        config.pluginmanager.register(KnownFailures(config, given, update), "hf_mps_known_failures")


def read(path: Path, name: str) -> list[Entry]:
    """Return the entries of a file, which messages call `name`. Raises pytest.UsageError, with the line's number."""
    entries = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise pytest.UsageError(f"{OPTION}={name}: {reason}; next: pytest {OPTION}={name} {UPDATE}") from error
    for number, line in enumerate(lines, 1):
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[0].isidentifier() or "::" not in words[1]:
            raise pytest.UsageError(
                f"{OPTION}={name}: line {number} is {line.strip()!r}; allowed: an exception's type and a test's id, "
                "as in NotImplementedError tests/test_ops.py::test_eig[mps]"
            )
        entries.append(Entry(words[0], words[1].rstrip(), f"{name}:{number}"))
    return entries


class KnownFailures:
    """Judges the tests of a run by the entries; with pytest-xdist in each worker, and the controller sums up."""

    def __init__(self, config: pytest.Config, names: list[str], update: bool) -> None:
        self.config = config
        self.paths = [config.invocation_params.dir / name for name in names]
        self.update = update
        self.entries: dict[str, Entry] = {}
        for path, name in zip(self.paths, names, strict=True):
            for entry in read(path, name) if path.exists() or not update else ():
                before = self.entries.setdefault(entry.test, entry)
                if before is not entry:
                    raise pytest.UsageError(f"{OPTION}: {entry.place} lists what {before.place} lists: {entry.test}")
        self.missing: set[str] = set()
        self._as_listed: set[str] = set()
        self._raised: dict[str, str | None] = {}
        """What each test of this run raised, None where it passed; for --known-failures-update."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Find the ids that name no test of a file that was collected in whole, before -k, -m and --deselect."""
        if any("::" in argument for argument in config.args) or config.getoption("lf", False):
            return
        collected = {item.nodeid for item in items}
        files = {test.partition("::")[0] for test in collected}
        for test in self.entries.keys() - collected:
            file = test.partition("::")[0]
            if file in files or not (config.rootpath / file).exists():
                self.missing.add(test)

    # The outermost wrapper, so that pytest's own has made its report of an expected failure before.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn a failure that is listed into an expected one (xfailed)."""
        report = yield
        if not report.failed or report.when == "teardown":
            return report
        raised = call.excinfo.type.__name__ if call.excinfo is not None else "Failed"
        report.__dict__["known_failures_raised"] = raised
        entry = self.entries.get(item.nodeid)
        if entry is not None and raised == entry.exception:
            self._as_listed.add(item.nodeid)
            _expect(report, entry)
        elif entry is not None:
            report.longrepr = (
                f"{entry.place} lists {entry.exception}, and {raised} was raised:\n\n{report.longreprtext}"
            )
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Fail a listed test that passed; a test whose subtests failed as listed has not."""
        # A subtest's report alone has a context.
        ended = report.when == "call" and report.passed and not hasattr(report, "context")
        entry = self.entries.get(report.nodeid)
        if ended and report.nodeid in self._as_listed and entry is not None:
            _expect(report, entry)
        elif ended and report.nodeid not in self._raised:
            report.__dict__["known_failures_raised"] = None
            # Where pytest-xdist has the plugin dsession, a worker has judged the test already.
            if entry is not None and not self.config.pluginmanager.hasplugin("dsession"):
                report.outcome = "failed"
                report.longrepr = f"passed, and {entry.place} lists it with {entry.exception}: delete that line"
        if "known_failures_raised" in report.__dict__:
            self._raised[report.nodeid] = report.__dict__["known_failures_raised"]
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Keep what an xdist worker found missing."""
        self.missing.update(getattr(node, "workeroutput", {}).get(MISSING, ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End red where an id names no test, or write the file anew."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[MISSING] = sorted(self.missing)
        elif self.update:
            self._write()
        elif self.missing and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the ids that name no test, or the file that was written."""
        if self.update:
            terminalreporter.write_line(f"hf_mps: what failed is written to {self.paths[0]}")
            return
        for test in sorted(self.missing):
            place = self.entries[test].place
            terminalreporter.write_line(f"FAILED {place} names no test: {test}; delete or rename it", red=True)

    def _write(self) -> None:
        """Rewrite the lines of the tests that ran, keep those of others and comments, append new failures."""
        path = self.paths[0]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else [HEADER]
        kept = []
        for line in lines:
            words = line.split(maxsplit=1)
            test = words[1].rstrip() if len(words) == 2 else ""
            if test not in self.entries:
                kept.append(line)
            elif test not in self.missing and self._raised.get(test, words[0]) is not None:
                kept.append(f"{self._raised.get(test, words[0])}\t{test}\n")
        new = sorted(test for test, raised in self._raised.items() if raised is not None and test not in self.entries)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join([*kept, *(f"{self._raised[test]}\t{test}\n" for test in new)]), encoding="utf-8")


def _expect(report: pytest.TestReport, entry: Entry) -> None:
    report.outcome = "skipped"
    report.__dict__["wasxfail"] = f"{entry.place}: {entry.exception}"
