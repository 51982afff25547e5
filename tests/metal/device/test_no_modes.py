"""What the layer computes for itself: the same in every mode of the caller's, which are there again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_mps.layer.fused_step import constants
from hf_mps.metal.device import probe
from hf_mps.metal.device.no_modes import no_modes
from tests import modes


def gradient() -> list[float]:
    weight = torch.linspace(-1, 2, 4, device="mps").view(2, 2).requires_grad_()
    return torch.autograd.grad((weight @ weight).square().sum(), weight)[0].cpu().flatten().tolist()


def state() -> tuple[Any, ...]:
    """What a caller can see of the modes that it stands in."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("mps"),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._is_torch_function_mode_enabled(),
        torch._C._get_tracing_state() is None,
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    )


@pytest.mark.parametrize("mode", modes.WAYS)
def test_a_gradient_is_the_same_and_the_mode_is_there_again(mode: str) -> None:
    def work() -> tuple[list[float], bool]:
        before = state()
        with no_modes():
            found = gradient()
        return found, state() == before

    expected = pytest.approx(gradient(), rel=1e-6)
    assert modes.WAYS[mode](work) == (expected, True)


@pytest.mark.parametrize("mode", modes.WAYS)
def test_the_probe_and_a_kept_number_are_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_known", {})

    def work() -> tuple[bool, torch.Tensor]:
        return probe._trial(), constants.number(0.5, torch.float32, torch.device("mps"))

    right, number = modes.WAYS[mode](work)
    assert right
    weight = torch.ones((), device="mps", requires_grad=True)
    (weight * number).backward()  # a number of an inference mode could not be kept for it
    assert weight.grad.item() == 0.5


def test_an_error_inside_leaves_the_callers_modes_as_they_were() -> None:
    with torch.no_grad(), modes.default_dtype(torch.float16), torch.autocast("mps", torch.float16):
        before = state()
        with pytest.raises(ZeroDivisionError), no_modes():
            raise ZeroDivisionError
        assert state() == before


def test_a_release_without_traces_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_tracing_state")
    expected = pytest.approx(gradient(), rel=1e-6)
    with torch.no_grad(), torch.device("meta"), torch.autocast("mps", torch.float16), no_modes():
        assert gradient() == expected
