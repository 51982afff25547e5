"""Sorting, selecting and searching run PyTorch's own Metal kernels, by the size of rows and elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import Dispatch

WAYS = {
    "one block": ((3, 100), torch.float32, "sort_block_float_tptg32_stable"),
    "one block of a column": ((3, 100), torch.int64, "sort_block_long_tptg32_stable"),
    "blocks that are merged": ((2, 6000), torch.int64, "mb_merge_final_long_tptg512_u16"),
    "floats as integers": ((300, 5000), torch.float32, "mb_merge_final_fkey_float_tptg1024_u16"),
    "digits": ((4, 2500), torch.float16, "radix_scatter_final_half_8bit_u16"),
    "digits of bytes": ((1, 9000), torch.uint8, "radix_scatter_final_uchar_4bit_u16"),
}


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw).to(dtype)
    return torch.randint(0, 100, shape, generator=draw).to(dtype)


@pytest.mark.parametrize("way", WAYS)
def test_the_size_decides_how_rows_are_sorted(kernels: Dispatch, way: str) -> None:
    shape, dtype, kernel = WAYS[way]
    given = drawn(shape, dtype)
    found = given.to("mps").sort(stable=True)
    assert kernels.ledger.kernels[kernel] >= 1
    wanted = given.sort(stable=True)
    torch.testing.assert_close(found.values.cpu(), wanted.values)
    torch.testing.assert_close(found.indices.cpu(), wanted.indices)


def test_a_dimension_that_is_not_the_last_and_a_view_are_sorted(kernels: Dispatch) -> None:
    given = drawn((40, 6), torch.float32)
    on_device = given.to("mps")
    for found, wanted in (
        (on_device.sort(dim=0, stable=True, descending=True), given.sort(dim=0, stable=True, descending=True)),
        (on_device.t()[::2].sort(stable=True), given.t()[::2].sort(stable=True)),
    ):
        torch.testing.assert_close(found.values.cpu(), wanted.values)
        torch.testing.assert_close(found.indices.cpu(), wanted.indices)
    assert kernels.ledger.operators["sort.stable"] == 2


def test_a_wrong_k_is_refused_in_pytorchs_words(kernels: Dispatch) -> None:
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        torch.ones(3, device="mps").topk(4)


@pytest.mark.parametrize("right", [False, True])
def test_values_are_searched_in_boundaries_of_any_dtype(kernels: Dispatch, right: bool) -> None:
    boundaries, given = torch.tensor([1, 3, 5, 7]), drawn((6, 9), torch.float32) * 4
    for edges in (boundaries, boundaries.float()):
        found = torch.bucketize(given.to("mps"), edges.to("mps"), right=right)
        torch.testing.assert_close(found.cpu(), torch.bucketize(given, edges, right=right))
    assert kernels.ledger.operators["bucketize.Tensor"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8], ids=str)
def test_equal_elements_may_come_in_any_order_and_their_places_are_right(kernels: Dispatch, dtype: torch.dtype) -> None:
    given = drawn((6, 70), dtype)
    on_device = given.to("mps")
    for found, wanted in ((on_device.sort(1), given.sort(1)), (on_device.topk(9, 1), given.topk(9, 1))):
        assert torch.equal(found.values.cpu(), wanted.values)
        assert torch.equal(given.gather(1, found.indices.cpu()), wanted.values)
    assert {"sort.stable", "topk"} <= set(kernels.ledger.operators)


def test_an_empty_output_is_resized_and_sorted_by_the_same_kernel(kernels: Dispatch) -> None:
    given = torch.tensor([[2.0, 1.0] * 600] * 2, device="mps")
    for run in (torch.sort, lambda *x, **out: torch.topk(*x, 7, **out)):
        wanted = run(given)
        kernels.ledger.clear()
        out = torch.empty(0, device="mps"), torch.empty(0, dtype=torch.int64, device="mps")
        found = run(given, out=out)
        assert kernels.ledger.kernels
        assert torch.equal(found.values, wanted.values)
        assert torch.equal(found.indices, wanted.indices)
