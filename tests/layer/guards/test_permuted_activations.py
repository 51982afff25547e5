"""Gradients of activations on permuted tensors: what a trial finds, and how a device without fault is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards.numerics.layouts import TRIALS
from hf_mps.metal.simulator import strictness
from tests.hazards import device
from tests.layer.guards.experiments import activations

NAME, RESULTS = "permuted-activations", "permuted-results"
# Of PyTorch's own since 2.14; they read strides.
OWN_KERNELS = ("sigmoid_backward", "silu_backward", "mish_backward")


@pytest.fixture(autouse=True)
def _settled(untouched: None) -> Iterator[None]:
    """The guard as it is in a process that has just begun, on a Mac that may have the fault."""
    with device.mac(macos="14.7"), strictness.off(*guards.get(NAME).faults):
        guards.get(NAME).forget()
        yield


def gradient(values: torch.Tensor) -> torch.Tensor:
    given = values.to("mps").transpose(0, 1).requires_grad_()
    return torch.autograd.grad(torch.tanh(given).square().sum(), given)[0].cpu()


def test_a_trial_names_the_operators_that_are_wrong() -> None:
    assert not guards.get(NAME).applies().value
    with strictness.on(NAME, RESULTS):
        found = guards.get(NAME).applies()
    assert found.value
    wrong = [name for name in TRIALS if torch_release() < (2, 14) or name not in OWN_KERNELS]
    assert found.reason == f"tried on the device: {', '.join(wrong)} differ from the CPU on permuted tensors"


def test_where_they_are_right_each_is_left_to_the_device_from_its_second_call_on() -> None:
    values = torch.linspace(-1, 1, 12).view(3, 4)
    with guards.suspended(NAME):
        right = gradient(values)
    assert len(guards.get(NAME).arounds) == len(TRIALS)
    assert torch.equal(gradient(values), right)
    assert "aten::tanh_backward" not in [put.place for put in guards.get(NAME).arounds]
    assert torch.equal(gradient(values), right)
    assert not guards.get(NAME).times


def test_batch_norm_of_permuted_tensors_trains_on_macos_26() -> None:
    def gradient(where: str) -> torch.Tensor:
        given = torch.linspace(-1, 1, 120, device=where).view(2, 5, 4, 3).permute(0, 3, 1, 2).requires_grad_()
        norm = torch.nn.BatchNorm2d(3, device=where)
        return torch.autograd.grad(norm(given).pow(3).sum(), given)[0].cpu()

    with device.mac(macos="26.1"), strictness.on("permuted-batch-norm"):
        guards.get(NAME).forget()
        with guards.suspended(NAME), pytest.raises(RuntimeError, match="view size is not compatible"):
            gradient("mps")
        assert torch.allclose(gradient("mps"), gradient("cpu"), atol=1e-5)


def test_a_permuted_result_is_never_written_and_of_prelu_only_one_in_channels_last() -> None:
    values = torch.linspace(0.1, 1, 120, device="mps").view(2, 5, 4, 3)
    transposed, channels_last = values.transpose(1, 2), values.permute(0, 3, 1, 2)
    prelu = torch.nn.PReLU(device="mps")
    with guards.suspended(NAME), strictness.on(RESULTS), torch.no_grad():
        for given in (transposed, channels_last):
            assert not torch.nn.functional.softplus(given).cpu().any()
            assert not torch.nn.functional.threshold(given, 0.0, 1.0).cpu().any()
        assert torch.equal(prelu(transposed), transposed)
        assert not prelu(channels_last).cpu().any()


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
