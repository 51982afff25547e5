"""Every test of the sentinels runs on the simulated device, with sentinels that have seen nothing yet."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _untouched(untouched: None) -> None:
    """As tests/conftest.py has it."""


@pytest.fixture(autouse=True)
def _no_aborts() -> None:
    """Unlike the guards' own tests: a training of the sentinels' is one that nothing ends."""
