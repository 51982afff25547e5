"""`pytest --simulated-metal`: anyone's test suite on a device of type `mps`, on a machine that has no Metal.

    pytest --simulated-metal             the default profile
    pytest --simulated-metal=m1-8gb      another Mac (hf_mps.metal.device.profiles)
    pytest --metal-kernels=2.13.0        the same, computing with that release's own Metal kernels (docs/kernels.md)
    pytest --known-failures=FILE         the tests that must fail, and how (hf_mps.metal.pytest_plugin.known_failures)

Fixtures: `metal_device` is torch.device("mps"), or skips with the probe's reason; `fallback_ledger` fails a test in
which an operator without a Metal kernel ran on the CPU; `metal_kernels` tells which kernels of the release ran in the
test; `metal_work` counts what a block launches, copies and waits for. The marker `metal` skips a test, with the reason,
where there is no Metal device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hf_mps.core import settings
from hf_mps.core.errors import UserError
from hf_mps.metal import kernels
from hf_mps.metal.pytest_plugin import known_failures

if TYPE_CHECKING:
    import torch

    from hf_mps.metal.fallback import Report
    from hf_mps.metal.kernels.coverage import Counting, Counts
    from hf_mps.metal.simulator.counters import Work

OPTION, VARIABLE = "--simulated-metal", "HF_MPS_SIMULATE"
KERNELS, KERNELS_VARIABLE = "--metal-kernels", "HF_MPS_KERNELS"
INSTALLED = "the installed torch's"
WORKER_COUNTS = "hf_mps_metal_kernels"
_environment = pytest.MonkeyPatch()
"""The variables that are set for a run: `pytest_unconfigure` takes them back."""
_enabled: list[bool] = []
"""Kernels that were enabled on a device which was there before: `pytest_unconfigure` ends them."""
_of_workers: list[tuple[str, Counts]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --simulated-metal, --metal-kernels and --known-failures."""
    group = parser.getgroup("hf_mps")
    told = "run on a simulated Metal device (torch device 'mps'); PROFILE names a Mac, m1-8gb for instance"
    group.addoption(OPTION, nargs="?", const="1", metavar="PROFILE", help=told)
    told = (
        "run on that device with a PyTorch release's own Metal kernels (hf-mps kernels fetch), the installed torch's "
        "where none is named; checked: each access is bounded"
    )
    group.addoption(KERNELS, nargs="?", const=INSTALLED, metavar="RELEASE[,checked]", help=told)
    known_failures.add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Ask for the device before a conftest can import torch: PyTorch looks for Metal once in a process."""
    given = early_config.known_args_namespace
    if given.metal_kernels is not None:
        _simulate(given.simulated_metal or os.environ.get(VARIABLE) or "1", given.metal_kernels)
    elif given.simulated_metal is not None:
        _simulate(given.simulated_metal, None)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and read the known failures."""
    config.addinivalue_line("markers", "metal: needs a Metal device, real or simulated; skipped where there is none")
    known_failures.configure(config)


def pytest_unconfigure() -> None:
    """Leave the environment, and a device that was there before, as they were."""
    while _enabled:
        _enabled.pop()
        kernels.disable()
    _environment.undo()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which device the suite runs on, and with whose kernels."""
    if config.getoption("simulated_metal") is None and config.getoption("metal_kernels") is None:
        return None
    from hf_mps.metal.device import choose

    return f"hf_mps: simulated Metal device {os.environ[VARIABLE]}: {kernels.told(choose())}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `metal` where there is no Metal."""
    if item.get_closest_marker("metal") is not None:
        _need_metal()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what an xdist worker counted to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    counted = _counted()
    if output is not None and counted is not None:
        output[WORKER_COUNTS] = (counted[0], counted[1].plain())
        kernels.coverage_is_said()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what an xdist worker counted."""
    sent = getattr(node, "workeroutput", {}).get(WORKER_COUNTS)
    if sent is not None:
        from hf_mps.metal.kernels.coverage import Counts

        _of_workers.append((sent[0], Counts.from_plain(sent[1])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in a line how much of what a Mac runs with Metal kernels ran with the release's."""
    counted = [each for each in (_counted(), *_of_workers) if each is not None]
    _of_workers.clear()
    if not counted:
        return
    from hf_mps.metal.kernels.coverage import Counts, covered

    counts = sum((counts for _, counts in counted), Counts())
    if counts.operators or counts.reasons:
        terminalreporter.write_line(f"hf_mps: {covered(counts, counted[0][0])}")
    kernels.coverage_is_said()


@pytest.fixture(scope="session")
def metal_device() -> torch.device:
    """The device `mps`; the test is skipped, with the reason, where there is none."""
    import torch

    _need_metal()
    return torch.device("mps")


@pytest.fixture
def fallback_ledger() -> FallbackLedger:
    """What fell back to the CPU during the test: read it, or let it be; at the end, anything not allowed fails it."""
    _need_metal()
    return FallbackLedger()


@pytest.fixture
def metal_kernels() -> Counting:
    """Which of the release's Metal kernels ran in the test; it is skipped, with the reason, where none are enabled.

    `kernels` counts launches by a kernel's name, `operators` the calls that launched them, `reasons` the calls of
    operators that have a launch rule which did not cover them; `coverage` says how much a Mac would run with kernels.
    """
    _need_metal()
    counting = kernels.counting()
    if counting is None:
        pytest.skip(f"needs PyTorch's own Metal kernels: pytest {KERNELS}=RELEASE")
    return counting


@pytest.fixture
def metal_work() -> Work:
    """What a block gives the device to do: `with metal_work: step()`, then `metal_work.at_most(launches=120, waits=0)`.

    `launches`, `waits`, `copies_in` and `copies_out` are the last block's counts, `operators` and `places` say of what.
    The test is skipped, with the reason, where the device is not simulated: a Mac's own does not count.
    """
    _need_metal()
    from hf_mps.metal import simulator
    from hf_mps.metal.simulator.counters import Work

    if simulator.loaded() is None:
        pytest.skip(f"counts of a simulated device: pytest {OPTION}")
    return Work()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Let the ledger judge a test that passed: as a failure of the test itself, not of its teardown."""
    result = yield
    ledger = pyfuncitem.funcargs.get("fallback_ledger")
    if isinstance(ledger, FallbackLedger):
        ledger.check()
    return result


class FallbackLedger:
    """The operators without a Metal kernel that a test ran on the CPU."""

    def __init__(self) -> None:
        from hf_mps.metal.fallback.accounting import ledger

        self._ledger = ledger
        self._since = ledger.snapshot()
        self._allowed: set[str] = set()

    def allow(self, *operators: str) -> None:
        """Let these operators ("aten::_ctc_loss") fall back in this test."""
        self._allowed.update(operators)

    def report(self) -> Report:
        """Return what fell back up to now; print it, or read its `operators`."""
        return self._ledger.report(self._since)

    def check(self) -> None:
        """Fail the test, naming every operator, where one fell back that was not allowed."""
        refused = [entry for entry in self.report().operators if entry.operator not in self._allowed]
        if refused:
            named = ", ".join(f"{entry.operator} (calls: {entry.calls})" for entry in refused)
            pytest.fail(f"ran on the CPU, having no Metal kernel: {named}", pytrace=False)


def _simulate(profile: str, release: str | None) -> None:
    """Set the variables for this process and its children, and load the device where torch is there already."""
    from hf_mps.metal.device import profiles

    asked = f"{OPTION}={profile}"
    try:
        _environment.setenv(VARIABLE, profile)
        profiles.get(profile)
        if release is not None:
            asked = KERNELS if release == INSTALLED else f"{KERNELS}={release}"
            _ask_for(release)
        # `import torch` loads the device where the layer is installed; a copy of the Metal wing alone loads it here.
        if "torch" in sys.modules or not _layer():
            _load(profile)
    except UserError as error:
        words = str(error)
        for name in (VARIABLE, KERNELS_VARIABLE):
            words = words.removeprefix(f"{name}={os.environ.get(name)}").lstrip(": ")
        pytest_unconfigure()
        # argparse gives the option the word behind it.
        way_on = f"; next: {OPTION}=1 {profile}" if Path(profile.partition("::")[0]).exists() else ""
        raise pytest.UsageError(f"{asked}: {words}{way_on}") from error


def _ask_for(release: str) -> None:
    from hf_mps.metal.kernels import store

    installed = store.installed()
    if release == INSTALLED:
        if installed is None:
            raise UserError(f"no torch is installed, whose release it would be; next: pytest {KERNELS}={store.EXAMPLE}")
        release = installed
    _environment.setenv(KERNELS_VARIABLE, release)
    if kernels.requested() is None:
        raise UserError(f"names no release; allowed: RELEASE or RELEASE,checked, for example {store.EXAMPLE}")


def _load(profile: str) -> None:
    from hf_mps.metal import simulator
    from hf_mps.metal.simulator import build

    simulator.load(profile)
    asked = settings.kernels()
    if asked is not None:
        enabled = kernels.running() is not None
        kernels.enable(asked[0], build.running("no simulated device is loaded"), checked=asked[1])
        if not enabled:
            _enabled.append(True)
    _switch_on()


def _layer() -> tuple[Any, ...]:
    """Return the entry point by which `import torch` switches the layer on; empty where the layer is not installed."""
    return tuple(entry_points(group="torch.backends", name="hf_mps"))


@cache  # every test that needs Metal asks for it
def _switch_on() -> None:
    """Switch the layer on where it is installed; else let the CPU run the operators that have no Metal kernel."""
    import torch

    if layer := _layer():
        layer[0].load()()
    elif torch.backends.mps.is_built():
        from hf_mps.metal import fallback
        from hf_mps.metal.device import availability

        availability.install()
        fallback.start()


def _counted() -> tuple[str, Counts] | None:
    """Return the release whose kernels run in this process, and what ran up to now; None where none do."""
    dispatch = kernels.running()
    if dispatch is None:
        return None
    from hf_mps.metal.kernels.coverage import Counts

    return dispatch.release.version, Counts.of(dispatch)


def _need_metal() -> None:
    from hf_mps.metal.device import metal

    _switch_on()
    verdict = metal()
    if not verdict.value:
        pytest.skip(f"needs Metal: {verdict.reason}")
