"""What every test of the guards needs: the simulated device, notices that can be said again, a Trainer in small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch  # noqa: F401  its autoload brings the device

from hf_mps import guards
from hf_mps.guards import notice
from hf_mps.guards.catalogue import NAMES


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """The guards of this process, as if nothing had happened yet."""
    from hf_mps import simulator

    if simulator.loaded() is None:
        pytest.skip("hazards are faults of the simulated device")
    _forget()
    yield
    _forget()


def _forget() -> None:
    notice.forget()
    for name in NAMES:
        guards.get(name).forget()
