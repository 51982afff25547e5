"""Every test of the guards runs on the simulated device, with guards that have done nothing yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _untouched(untouched: None) -> None:
    """As tests/conftest.py has it."""


@pytest.fixture(autouse=True)
def _no_aborts(simulated: None) -> Iterator[None]:
    """What ends a process would end the tests: test_aborts.py gives each of them a process of its own."""
    from hf_mps.metal.device import faults
    from hf_mps.metal.simulator import strictness

    with strictness.off(*faults.ABORTS):
        yield
