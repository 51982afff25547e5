"""Being another machine for the length of a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_mps.metal.device import machine, probe
from hf_mps.metal.device.machine import Machine
from hf_mps.metal.device.probe import Readings
from tests.metal.device.machines import Pretend


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Be another machine until the test ends: `pretend(machine, built=…, found=…, trial=…)`."""

    def be(here: Machine, *, built: bool = True, found: bool = True, trial: Callable[[], bool] = lambda: True) -> None:
        monkeypatch.setattr(machine, "_overridden", here)
        monkeypatch.setattr(probe, "_known", None)
        # Whatever an earlier test left on the device of this process is not that machine's.
        monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
        monkeypatch.setattr(probe, "read", lambda asked, owned=False: read(asked, owned))

        def read(asked: Machine, owned: bool) -> Readings:
            return Readings(asked, "2.13.0", built, found, trial, probe._why_not(asked, owned) if found else "")

    # The tests say by themselves what the environment asks for.
    for name in ("HF_MPS", "HF_MPS_DEVICE", "HF_MPS_PROBE", "CI"):
        monkeypatch.delenv(name, raising=False)
    return be
