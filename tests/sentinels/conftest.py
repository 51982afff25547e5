"""What every test of the sentinels needs: the simulated device, and sentinels that have seen nothing yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch  # noqa: F401  its autoload brings the device

from hf_mps import guards, sentinels
from hf_mps.guards import notice
from hf_mps.sentinels.catalogue import NAMES
from hf_mps.sentinels.stream import STREAM


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """The guards and sentinels of this process, as if nothing had happened yet."""
    from hf_mps import simulator

    if simulator.loaded() is None:
        pytest.skip("hazards are faults of the simulated device")
    _forget()
    yield
    _forget()


def _forget() -> None:
    notice.forget()
    STREAM.forget()
    for name in NAMES:
        sentinels.get(name).forget()
    for name in guards.catalogue.NAMES:
        guards.get(name).forget()
