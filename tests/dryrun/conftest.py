"""The simulated device, and what a library sets when it is first imported, which no single test is to answer for."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    import sklearn  # noqa: F401  sets KMP_ variables
    import torch  # noqa: F401  its autoload brings the device
