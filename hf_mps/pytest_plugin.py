"""`pytest --simulated-metal`: anyone's test suite on a device of type `mps`, on a machine that has no Metal.

    pytest --simulated-metal             the default profile
    pytest --simulated-metal=m1-8gb      another Mac (hf_mps.device.profiles)

Fixtures: `metal_device` is torch.device("mps"), or skips with the probe's reason; `fallback_ledger` fails a test in
which an operator without a Metal kernel ran on the CPU. The marker `metal` skips a test, with the reason, where there
is no Metal device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from hf_mps.fallback import Report

OPTION = "--simulated-metal"
VARIABLE = "HF_MPS_SIMULATE"
_before: list[str | None] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --simulated-metal."""
    parser.getgroup("hf_mps").addoption(
        OPTION,
        nargs="?",
        const="1",
        default=None,
        metavar="PROFILE",
        help="run on a simulated Metal device (torch device 'mps'); PROFILE names a Mac, m1-8gb for instance",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Ask for the device before a conftest can import torch: PyTorch looks for Metal once in a process."""
    _simulate(early_config.known_args_namespace.simulated_metal)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "metal: needs a Metal device, real or simulated; skipped where there is none")


def pytest_unconfigure() -> None:
    """Leave the environment as it was."""
    while _before:
        value = _before.pop()
        if value is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = value


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which device the suite runs on."""
    if config.getoption("simulated_metal") is None:
        return None
    from hf_mps.device import choose

    return f"hf_mps: simulated Metal device {os.environ[VARIABLE]}: {choose()}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `metal` where there is no Metal."""
    if item.get_closest_marker("metal") is not None:
        _need_metal()


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
        from hf_mps.fallback.accounting import ledger

        self._ledger = ledger
        self._since = ledger.snapshot()
        self._allowed: set[str] = set()

    def allow(self, *operators: str) -> None:
        """Let these operators ("aten::_ctc_loss") fall back in this test."""
        self._allowed.update(operators)

    def report(self) -> Report:
        """What fell back up to now; print it, or read its `operators`."""
        return self._ledger.report(self._since)

    def check(self) -> None:
        """Fail the test, naming every operator, where one fell back that was not allowed."""
        refused = [entry for entry in self.report().operators if entry.operator not in self._allowed]
        if refused:
            named = ", ".join(f"{entry.operator} (calls: {entry.calls})" for entry in refused)
            pytest.fail(f"ran on the CPU, having no Metal kernel: {named}", pytrace=False)


def _simulate(profile: str | None) -> None:
    """Set the variable for this process and its children, and load the device where torch is there already."""
    if profile is None:
        return
    from hf_mps.core.errors import UserError
    from hf_mps.device import profiles

    try:
        profiles.get(profile)
        _before.append(os.environ.get(VARIABLE))
        os.environ[VARIABLE] = profile
        if "torch" in sys.modules:
            from hf_mps import simulator
            from hf_mps.activation import activate

            simulator.load(profile)
            activate.activate()
    except UserError as error:
        raise pytest.UsageError(f"{OPTION}={profile}: {str(error).removeprefix(f'{VARIABLE}={profile} ')}") from error


def _need_metal() -> None:
    from hf_mps.activation import activate
    from hf_mps.device import metal

    activate.activate()
    verdict = metal()
    if not verdict.value:
        pytest.skip(f"needs Metal: {verdict.reason}")
