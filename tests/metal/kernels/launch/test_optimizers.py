"""Fused optimizers run their Metal kernels over lists of all sizes, with the CPU's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch

SHAPES = [(7,), (0,), (3, 5), (65536,), (65537,), (), (70, 4)]
"""One element, none, exactly a chunk and one more."""
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda given, **options: torch.optim.Adam(given, weight_decay=0.1, **options),
    "Adam, amsgrad": lambda given, **options: torch.optim.Adam(given, amsgrad=True, **options),
    "AdamW": lambda given, **options: torch.optim.AdamW(given, weight_decay=0.1, **options),
    "AdamW, a large epsilon": lambda given, **options: torch.optim.AdamW(given, eps=1e-3, **options),
    "AdamW, amsgrad": lambda given, **options: torch.optim.AdamW(given, amsgrad=True, **options),
    "AdamW, maximize": lambda given, **options: torch.optim.AdamW(given, maximize=True, **options),
    "AdamW, a rate on the device": lambda given, **options: torch.optim.AdamW(
        given, lr=torch.tensor(1e-3, device=given[0].device), **options
    ),
    "SGD": lambda given, **options: torch.optim.SGD(given, lr=0.1, weight_decay=0.1, **options),
    "SGD, momentum": lambda given, **options: torch.optim.SGD(given, lr=0.1, momentum=0.9, dampening=0.5, **options),
    "SGD, Nesterov": lambda given, **options: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, **options),
    "SGD, maximize": lambda given, **options: torch.optim.SGD(given, lr=0.1, maximize=True, **options),
}


def trained(make: Callable[..., Any], device: str, dtype: torch.dtype, fused: bool, steps: int = 3) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    parameters = [torch.nn.Parameter(each.to(device)) for each in given]
    optimizer = make(parameters, fused=fused)
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=draw).to(dtype).to(device)
        optimizer.step()
    return [each.detach().cpu() for each in parameters]


@pytest.mark.parametrize("name", MAKERS)
def test_three_steps_are_the_cpus(kernels: Dispatch, name: str) -> None:
    make = MAKERS[name]
    found = trained(make, "mps", torch.float32, fused=True)
    ran = [each for each in kernels.ledger.operators if each.startswith("_fused_")]
    assert ran, kernels.ledger.reasons
    wanted = trained(make, "cpu", torch.float32, fused=False)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW, a large epsilon", "SGD, momentum"])
def test_half_precision_parameters_stay_near(kernels: Dispatch, name: str, dtype: torch.dtype) -> None:
    found = trained(MAKERS[name], "mps", dtype, fused=True)
    assert any(each.startswith("_fused_") for each in kernels.ledger.operators)
    wanted = trained(MAKERS[name], "cpu", dtype, fused=False)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_a_launch_has_32_tensors_and_32_chunks(kernels: Dispatch) -> None:
    for shapes, launches in (([(4,)] * 33, 2), ([(65536 * 33,)], 2), ([(4,)] * 32, 1), ([(65536 * 20,)] * 2, 2)):
        kernels.ledger.clear()
        parameters = [torch.nn.Parameter(torch.zeros(shape, device="mps")) for shape in shapes]
        for each in parameters:
            each.grad = torch.ones_like(each)
        torch.optim.SGD(parameters, lr=1.0, fused=True).step()
        assert kernels.ledger.kernels["fused_sgd_float"] == launches
        assert all(bool((each == -1).all()) for each in parameters)


def test_a_step_that_overflowed_changes_nothing(kernels: Dispatch) -> None:
    for make in (MAKERS["AdamW"], MAKERS["SGD, momentum"]):
        parameter = torch.nn.Parameter(torch.ones(5, device="mps"))
        parameter.grad = torch.ones_like(parameter)
        optimizer: Any = make([parameter], fused=True)
        optimizer.found_inf = torch.ones((), device="mps")
        optimizer.step()
        assert bool((parameter == 1).all())


def test_gradients_are_divided_by_their_scale(kernels: Dispatch) -> None:
    results = []
    for scale in (1.0, 1024.0):
        parameter = torch.nn.Parameter(torch.ones(5, device="mps"))
        parameter.grad = torch.full_like(parameter, 0.5 * scale)
        optimizer: Any = torch.optim.SGD([parameter], lr=0.1, fused=True)
        optimizer.grad_scale = torch.full((), scale, device="mps")
        optimizer.found_inf = torch.zeros((), device="mps")
        optimizer.step()
        results.append(parameter.detach().cpu())
    assert kernels.ledger.operators["_fused_sgd_"] == 2
    torch.testing.assert_close(results[0], torch.full((5,), 0.95))
    torch.testing.assert_close(results[1], results[0])


def test_parameters_of_any_dense_layout_are_walked_in_memory(kernels: Dispatch) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 6, device="mps").t())
    before = parameter.detach().cpu().clone()
    parameter.grad = torch.arange(24.0, device="mps").reshape(4, 6).t()
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    assert kernels.ledger.operators["_fused_sgd_"] == 1
    torch.testing.assert_close(parameter.detach().cpu(), before - torch.arange(24.0).reshape(4, 6).t())
