"""The fixture that puts a test on the simulated device, whatever started the process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mps() -> None:
    """The simulated device is loaded in this process (on a Mac: the test is skipped, Metal is there)."""
    import torch

    from hf_mps import simulator

    if simulator.loaded() is None:
        if torch.backends.mps.is_built():
            pytest.skip("this PyTorch has real Metal")
        simulator.load("1")
