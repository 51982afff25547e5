"""Every test of a fused step runs on the simulated device, with no part switched on that it did not switch on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from hf_mps.core.choice import Choice
from hf_mps.layer.fused_step import switch

Fused = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def _untouched(untouched: None, simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/conftest.py has it; kernels of our own act, which the simulated device computes more slowly."""
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", "1")


@pytest.fixture
def fused() -> Fused:
    """`with fused():` has every part act on the device."""

    @contextmanager
    def on() -> Iterator[None]:
        with switch.running(Choice("on", "a test"), "mps"):
            yield

    return on


@pytest.fixture(params=["operators", "kernel"])
def way(request: pytest.FixtureRequest, _untouched: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether PyTorch's operators compute what a part fuses, or a kernel of ours."""
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", str(int(request.param == "kernel")))
    return str(request.param)
