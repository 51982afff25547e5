"""Gradients of activations on permuted tensors: what a trial finds, and how a device without fault is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_mps import guards
from hf_mps.guards.numerics.permuted_activations import TRIALS
from hf_mps.simulator import strictness
from tests.guards.experiments import activations

NAME = "permuted-activations"


@pytest.fixture(autouse=True)
def _settled(untouched: None) -> None:
    """The guard as it is in a process that has just begun."""


def gradient(values: torch.Tensor) -> torch.Tensor:
    given = values.to("mps").transpose(0, 1).requires_grad_()
    return torch.autograd.grad(torch.tanh(given).square().sum(), given)[0].cpu()


def test_a_trial_names_the_operators_that_are_wrong() -> None:
    assert not guards.get(NAME).applies().value
    with strictness.on(NAME):
        found = guards.get(NAME).applies()
    assert found.value
    assert found.reason == f"tried on the device: {', '.join(TRIALS)} differ from the CPU on permuted tensors"


def test_where_they_are_right_each_is_left_to_the_device_from_its_second_call_on() -> None:
    values = torch.linspace(-1, 1, 12).view(3, 4)
    with guards.suspended(NAME):
        right = gradient(values)
    assert len(guards.get(NAME).arounds) == len(TRIALS)
    assert torch.equal(gradient(values), right)
    assert "aten::tanh_backward" not in [put.place for put in guards.get(NAME).arounds]
    assert torch.equal(gradient(values), right)
    assert not guards.get(NAME).times


def test_what_lies_contiguously_goes_to_the_device_as_it_is() -> None:
    with strictness.on(NAME):
        given = torch.linspace(-1, 1, 12, device="mps").requires_grad_()
        torch.autograd.grad(torch.tanh(given).square().sum(), given)
        assert guards.get(NAME).verdict().value
        assert not guards.get(NAME).times


def test_the_guard_of_parameters_no_longer_answers_for_them(tmp_path: Path) -> None:
    with strictness.on(NAME), guards.suspended(NAME):
        assert not activations.permuted_values(tmp_path)
        assert not guards.get("non-contiguous").applies().value
