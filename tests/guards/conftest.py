"""Every test of the guards runs on the simulated device, with guards that have done nothing yet."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _untouched(untouched: None) -> None:
    """As tests/conftest.py has it."""
