"""Gradients' calls come from forward passes of their size, with arguments that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from hf_mps.core.errors import UserError
from scripts.conformance import capture, opinfo, samples
from scripts.conformance.calls import Call
from scripts.conformance.capture import Capture

WANTED = ["log_sigmoid_forward", "log_sigmoid_backward", "_standard_gamma", "_standard_gamma_grad", "unfold_backward"]


def captured(make: Callable[[Capture], Iterator[Callable[[], None]]]) -> list[Call]:
    mode = Capture(WANTED)
    for run in make(mode):
        mode.gradients.clear()
        with mode:
            run()
    return [call for kept in mode.calls.values() for call in kept.values()]


@pytest.mark.usefixtures("mps")
def test_a_gradient_is_resized_with_its_forward_pass() -> None:
    operator = next(each for each in op_db if each.name == "nn.functional.logsigmoid")
    found = captured(lambda mode: samples.of_operator(operator, torch.float32, mode))
    gradients = [call for call in found if call.operator == "log_sigmoid_backward"]
    assert {call.size for call in gradients} == {"small", "one", "empty", "large"}
    for call in gradients:
        _, given, buffer = call.tensors
        torch.testing.assert_close(buffer, (-given.abs()).exp())
    assert {call.size for call in found if call.operator == "log_sigmoid_forward"} == {"small"}


@pytest.mark.usefixtures("mps")
def test_distributions_give_parameters_a_meaning() -> None:
    found = captured(lambda mode: samples.of_distribution(torch.distributions.Gamma, mode))
    gradients = [call for call in found if call.operator == "_standard_gamma_grad"]
    assert {call.size for call in gradients} >= {"small", "large"}
    assert all((tensor > 0).all() for call in gradients for tensor in call.tensors)


def test_without_a_device_there_is_one_line_and_not_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_metal(*_: object) -> Iterator[Callable[[], None]]:
        yield lambda: torch.ones(2, device="meta").sum().item()

    operator = next(each for each in op_db if each.name == "mul")
    monkeypatch.setattr(opinfo, "operators", lambda: [operator])
    monkeypatch.setattr(opinfo, "optimizers", list)
    monkeypatch.setattr(torch.distributions, "__all__", [])
    monkeypatch.setattr(samples, "of_operator", without_metal)
    with pytest.raises(UserError) as told:
        capture.captured(["mul.Tensor"])
    assert str(told.value).startswith(
        "none of PyTorch's samples called mul.Tensor on the device mps, the last one ended"
    )
    assert str(told.value).endswith("next, where there is no Metal: HF_MPS_SIMULATE=1")


@pytest.mark.usefixtures("mps")
def test_a_gradients_operator_counts_as_one_in_a_forward_pass_too() -> None:
    mode = Capture(WANTED)
    with mode:
        torch.ops.aten.unfold_backward(torch.ones(1, 2, 3, device="mps"), [1, 4], 1, 3, 1)
    (call,) = (call for kept in mode.calls.values() for call in kept.values())
    assert call.of_backward
