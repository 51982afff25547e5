"""Reductions and ranges as 2.14 has them; run where that release was fetched (hf-mps kernels fetch 2.14.1)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from hf_mps.core.releases import torch_release
from hf_mps.metal.kernels.launch.reduce import Blocks, collapsed, contiguous
from hf_mps.metal.kernels.rules import Dispatch


def test_dimensions_around_the_reduced_one_become_blocks() -> None:
    given = torch.empty(4, 5, 6, 7)
    assert collapsed(given.shape, given.stride(), 1) == Blocks(4, 5, 42, 42, 1, 210)
    assert contiguous(4, 5, 42) == Blocks(4, 5, 42, 42, 1, 210)
    sliced = torch.empty(4, 9, 6)[:, 2:5]
    assert collapsed(sliced.shape, sliced.stride(), 1) == Blocks(4, 3, 6, 6, 1, 54)
    assert collapsed(given.shape, given.permute(1, 0, 3, 2).stride(), 3) is None


LAYOUTS = {
    "few rows, long": ((2, 5000), 1, None, ["sum_reduction_inner_chunk", "sum_reduction_inner"]),
    "many short rows": ((3000, 100), 1, None, ["sum_reduction_inner_chunk"]),
    "few columns": ((40000, 3), 0, None, ["sum_reduction_narrow", "sum_reduction_narrow"]),
    "tall": ((6000, 40), 0, None, ["sum_reduction_outer", "sum_reduction_outer"]),
    "short dimension": ((40, 4000), 0, None, ["sum_reduction_outer_small_dim"]),
    "in the middle": ((4, 200, 100), 1, None, ["sum_reduction_outer"]),
    "all": ((300, 1000), (), None, ["sum_reduction_flat", "sum_reduction"]),
    "every other column": ((9000, 30), 0, 2, ["sum_reduction_narrow_strided", "sum_reduction_narrow"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_decides_the_kernels(newer: Dispatch, layout: str) -> None:
    shape, dim, step, launched = LAYOUTS[layout]
    given = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    on_device = given.to("mps")
    view, moved = (given[:, ::step], on_device[:, ::step]) if step else (given, on_device)
    newer.ledger.clear()
    found = moved.sum(dim)
    assert list(newer.ledger.kernels.elements()) == [f"{name}_float_float" for name in launched]
    torch.testing.assert_close(found.cpu().double(), view.double().sum(dim), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 7, 33), (40000, 3), (6000, 40), (2, 40000), (4, 200, 100)], ids=str)
@pytest.mark.parametrize("name", ["argmax", "argmin", "max", "min"])
def test_extremes_and_their_places_agree(newer: Dispatch, name: str, shape: tuple[int, ...]) -> None:
    order = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(0))
    given = order.view(shape).float()

    def of(tensor: Tensor) -> list[Tensor]:
        found = []
        for dim in range(len(shape)):
            result = getattr(torch, name)(tensor, dim)
            found += list(result) if isinstance(result, tuple) else [result]
        return [each.cpu() for each in found]

    torch.testing.assert_close(of(given.to("mps")), of(given))
    assert newer.ledger.reasons.total() == newer.ledger.reasons["copy_", "a blit between host and device, no kernel"]


@pytest.mark.parametrize("given", [(0, 7), (5, 0, -2), (1.5, 9.2, 0.3), (3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_a_range_has_the_numbers_of_the_cpus(newer: Dispatch, dtype: torch.dtype, given: tuple[float, ...]) -> None:
    if dtype != torch.float32:
        given = tuple(int(each) or 1 for each in given) if len(given) == 3 else given
    newer.ledger.clear()
    torch.testing.assert_close(torch.arange(*given, dtype=dtype, device="mps").cpu(), torch.arange(*given, dtype=dtype))
    assert newer.ledger.operators["arange.start_out"] == 1


def test_a_step_below_one_is_an_error_of_int64_alone(newer: Dispatch) -> None:
    # Since 2.14 PyTorch looks at the step before it is made a whole number.
    with pytest.raises(ValueError, match="step must be nonzero") if torch_release() < (2, 14) else nullcontext():
        torch.arange(0, 5, 0.5, dtype=torch.int64, device="mps")
    assert torch.arange(0, 2, 0.5, dtype=torch.int32, device="mps").tolist() == [0, 0, 0, 0]
