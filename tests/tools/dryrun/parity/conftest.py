"""The simulated device, whose faults the tests switch on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for


@pytest.fixture(autouse=True)
def _simulated(simulated: None) -> None:
    """As tests/conftest.py has it."""
