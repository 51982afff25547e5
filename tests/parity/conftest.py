"""The simulated device, whose faults the tests switch on."""

from __future__ import annotations

import pytest
import torch  # noqa: F401  its autoload brings the device


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for


@pytest.fixture(autouse=True)
def _device() -> None:
    from hf_mps import simulator

    if simulator.loaded() is None:
        pytest.skip("hazards are faults of the simulated device")
