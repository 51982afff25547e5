"""CUDA's words on a Mac: what narrows an autocast is done on mps, what would turn one on is said with its line."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice

pytestmark = pytest.mark.filterwarnings(
    "ignore:CUDA is not available or torch_xla", "ignore:torch.cuda.amp", "ignore:`torch.cuda.amp"
)


def said(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [each for each in caught if issubclass(each.category, GuardNotice)]


def product() -> torch.dtype:
    x = torch.ones(2, 2, device="mps")
    return (x @ x).dtype


def mixed() -> None:
    with torch.autocast("cuda", dtype=torch.float16):
        assert product() == torch.float32, "numbers are what they are without the guard"


def test_mixed_precision_that_does_nothing_is_said_once_with_its_line() -> None:
    (line,) = said(mixed)
    assert str(line.message).startswith(
        'hf_mps: torch.autocast("cuda") does nothing on mps, and this computes in the dtype of its inputs; '
        'next: torch.autocast("mps", dtype=torch.float16), or device.type in place of "cuda" (cuda-words: '
    )
    assert line.filename == __file__
    assert not said(mixed)
    guards.get("cuda-words").forget()
    with guards.suspended("cuda-words"):
        assert not said(mixed)


def test_a_scaler_for_cuda_stays_disabled_and_is_said() -> None:
    def scaled() -> None:
        for scaler in (torch.amp.GradScaler("cuda"), torch.amp.GradScaler(), torch.cuda.amp.GradScaler()):
            assert not scaler.is_enabled()

    (line,) = said(scaled)
    assert 'GradScaler("cuda") scales nothing on mps; next: torch.amp.GradScaler("mps")' in str(line.message)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.autocast("mps", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cuda", enabled=False),
        lambda: torch.cuda.amp.autocast(enabled=False),
        lambda: torch.amp.GradScaler("mps"),
        lambda: torch.amp.GradScaler("cuda", enabled=False),
    ],
)
def test_nothing_is_said_where_nothing_is_asked_of_cuda(call: Callable[[], object]) -> None:
    assert not said(call)


def test_on_the_cpu_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    assert not said(lambda: torch.autocast("cuda"))


def test_where_there_is_cuda_its_words_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch.autocast("cuda", enabled=False).device == "cuda"


def test_the_autocast_around_is_as_it_was_behind_it() -> None:
    with torch.autocast("mps", dtype=torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("mps")
            with torch.autocast("mps"):
                assert torch.get_autocast_dtype("mps") == torch.bfloat16
        assert torch.is_autocast_enabled("mps")
        assert torch.get_autocast_dtype("mps") == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")


class Island(nn.Module):
    """A layer that is computed in float32 on purpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ x


def test_a_compiled_model_has_its_float32_part_in_one_graph() -> None:
    compiled = torch.compile(Island(), backend="eager", fullgraph=True)
    x = torch.ones(2, 2, device="mps")
    with torch.autocast("mps", dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.float32
        with guards.suspended("cuda-words"):
            torch._dynamo.reset()
            assert compiled(x).dtype == torch.bfloat16
    torch._dynamo.reset()


def scripted(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device_type="cuda", enabled=False):
        return x @ x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_compiles_it_as_ever() -> None:
    assert torch.jit.script(scripted)(torch.ones(2, 2, device="mps")).dtype == torch.float32
