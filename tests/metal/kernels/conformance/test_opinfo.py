"""PyTorch's samples as the report takes them: made without a walk up the stack, from the seed that PyTorch gives."""

from __future__ import annotations

import inspect

import pytest
import torch

from scripts.conformance import opinfo


def _samples(name: str) -> list[torch.Tensor]:
    operator = next(each for each in opinfo.operators() if each.name == name)
    return [sample.input for sample in operator.sample_inputs("cpu", torch.float32)]


def test_samples_read_no_frame_of_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    stack = inspect.stack
    monkeypatch.setattr(inspect, "stack", lambda context=1: read.append(context) or stack(context))
    assert len(_samples("nn.functional.softshrink")) > 3
    assert read == []


@pytest.mark.usefixtures("mps")
def test_samples_are_the_same_each_time_and_those_of_torchs_seed() -> None:
    first = _samples("sin")
    torch.manual_seed(5)
    assert all(map(torch.equal, first, _samples("sin")))
    torch.manual_seed(7)
    wanted = torch.rand(9), torch.rand(9, device="mps").cpu()
    opinfo.seed(7)
    assert torch.equal(torch.rand(9), wanted[0])
    assert torch.equal(torch.rand(9, device="mps").cpu(), wanted[1])
