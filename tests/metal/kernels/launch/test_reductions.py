"""Reductions and histc run PyTorch's own Metal kernels, in every layout that the host tells apart, as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import Dispatch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("shape", "dim", "kernels_of_sum"),
    [
        ((7, 33), 1, ["sum_reduction_inner_float_float"]),
        ((7, 33), 0, ["sum_reduction_outer_float_float"]),
        ((5, 7, 33), 1, ["sum_reduction_float_float"]),
        ((5, 7, 33), (0, 2), ["sum_reduction_float_float"]),
        ((100, 81), (), ["sum_reduction_float_float"]),
        ((130, 160), (), ["sum_reduction_float_float", "sum_reduction_float_float"]),
    ],
)
def test_the_layout_decides_the_kernel(
    kernels: Dispatch, draw: torch.Generator, shape: tuple[int, ...], dim: tuple[int, ...], kernels_of_sum: list[str]
) -> None:
    given = torch.randn(shape, generator=draw)
    found = given.to("mps").sum(dim)
    assert list(kernels.ledger.kernels.elements()) == kernels_of_sum
    torch.testing.assert_close(found.cpu().double(), given.double().sum(dim), rtol=1e-5, atol=1e-4)


def test_a_tensor_that_is_not_dense_is_read_where_it_lies(kernels: Dispatch, draw: torch.Generator) -> None:
    given = torch.randn(400, 70, generator=draw)
    on_device = given.to("mps")
    kernels.ledger.clear()
    found = on_device[:, 3::2].sum()
    assert "sum_reduction_strided_float_float" in kernels.ledger.kernels
    torch.testing.assert_close(found.cpu().double(), given[:, 3::2].double().sum(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(on_device.t().amax(0).cpu(), given.t().amax(0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_mean_rounds_once_however_long_the_row_is(
    kernels: Dispatch, draw: torch.Generator, dtype: torch.dtype
) -> None:
    given = (torch.randn(3, 4000, generator=draw) + 100).to(dtype)
    found = given.to("mps").mean(1)
    assert kernels.ledger.operators["mean.dim"] == 1
    torch.testing.assert_close(found.cpu(), given.double().mean(1).to(dtype), rtol=1e-6, atol=0)


def test_results_go_where_out_says(kernels: Dispatch, draw: torch.Generator) -> None:
    given = torch.randn(4, 5, generator=draw)
    room = torch.zeros(5, 2, device="mps")
    torch.sum(given.to("mps"), 0, out=room[:, 1])
    assert kernels.ledger.operators["sum.IntList_out"] == 1
    torch.testing.assert_close(room.cpu(), torch.stack([torch.zeros(5), given.sum(0)], 1))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), ()], ids=str)
def test_nothing_and_one_element_have_the_cpus_results(kernels: Dispatch, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape)
    on_device = given.to("mps")
    for name in ("sum", "mean", "any", "all"):
        torch.testing.assert_close(getattr(on_device, name)().cpu(), getattr(given, name)(), equal_nan=True)
    assert kernels.ledger.operators


def test_a_wrong_dimension_is_refused_in_pytorchs_words(kernels: Dispatch) -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.ones(2, 3, device="mps").sum(2)
    with pytest.raises(IndexError, match="non-zero size"):
        torch.ones(0, 3, device="mps").amax(0)


def test_nan_is_the_extreme_and_its_place_is_found(kernels: Dispatch) -> None:
    given = torch.tensor([[1.0, float("nan"), 3.0], [5.0, 2.0, 5.0]])
    on_device = given.to("mps")
    torch.testing.assert_close(on_device.amax(1).cpu(), given.amax(1), equal_nan=True)
    assert on_device.argmax(1).tolist() == [1, 0]


def test_clipping_takes_a_norm_of_each_gradient(kernels: Dispatch, draw: torch.Generator) -> None:
    def clipped(device: str) -> Tensor:
        weights = [torch.nn.Parameter(torch.zeros(8, 9, device=device)) for _ in range(3)]
        for scale, weight in enumerate(weights):
            weight.grad = torch.full((8, 9), float(scale), device=device)
        return torch.nn.utils.clip_grad_norm_(weights, 1.0)

    torch.testing.assert_close(clipped("mps").cpu(), clipped("cpu"))
    assert kernels.ledger.operators["linalg_vector_norm"] == 4


def test_booleans_have_an_extreme_however_many_they_are(kernels: Dispatch) -> None:
    given = torch.zeros(400, 50, dtype=torch.bool)
    given[3, 7] = True
    assert given.to("mps").amax().item() is True
    assert kernels.ledger.operators["amax"] == 1
    assert given.to("mps").amin(1).any().item() is False


def test_what_is_mpsgraph_on_the_release_runs_as_without_kernels(kernels: Dispatch) -> None:
    assert torch.arange(6.0, device="mps").view(2, 3).max(1).indices.tolist() == [2, 2]
    assert kernels.ledger.reasons["max.dim", "MPSGraph on this release"] == 1


@pytest.mark.parametrize("edges", [{}, {"min": -1, "max": 1}], ids=["all", "some"])
def test_elements_are_counted_between_edges_wherever_they_lie(kernels: Dispatch, edges: dict[str, int]) -> None:
    given = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    for view in (given, given.t(), given[:, ::3]):
        torch.testing.assert_close(torch.histc(view.to("mps"), 7, **edges).cpu(), torch.histc(view, 7, **edges))
    assert kernels.ledger.operators["histc"] == 3
    assert kernels.ledger.kernels["histogramdd_float"] == 3
