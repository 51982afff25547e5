"""Scaled dot-product attention runs Metal's vector kernels for short queries and its flash attention for others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import Dispatch

OPERATOR = "_scaled_dot_product_attention_math_for_mps"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attended(shape: tuple[int, ...], dtype: torch.dtype, mask: str | None = None, causal: bool = False) -> Tensor:
    """Attention on the device against the CPU's in float64: the largest difference must be the dtype's rounding.

    `shape` is batch, heads, heads of the keys, length of the queries, length of the keys, size of a head.
    """
    batch, heads, fewer, length, keys, size = shape
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((batch, at, long, size), generator=draw).to(dtype)
        for at, long in ((heads, length), (fewer, keys), (fewer, keys))
    )
    masks = {
        "boolean": torch.rand((batch, 1, length, keys), generator=draw) > 0.3,
        "boolean for all": torch.rand((length, keys), generator=draw) > 0.3,
        "added": torch.randn((batch, heads, length, keys), generator=draw).to(dtype),
    }
    given = masks[mask] if mask is not None else None
    moved = given.to("mps") if given is not None else None
    call = torch.ops.aten._scaled_dot_product_attention_math_for_mps
    grouped = heads != fewer
    found = call(*(each.to("mps") for each in (query, key, value)), moved, 0.0, causal, enable_gqa=grouped)[0]
    exact = given.double() if given is not None and given.dtype != torch.bool else given
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), exact, is_causal=causal, enable_gqa=grouped
    )
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shape", "mask", "causal", "kernel"),
    [
        ((2, 4, 2, 3, 100, 64), None, False, "sdpa_vector_T_64_64_masknone"),
        ((2, 4, 4, 5, 100, 64), None, True, "sdpa_vector_T_64_64_masknone_causal"),
        ((2, 4, 4, 5, 100, 64), "boolean", False, "sdpa_vector_T_64_64_maskbool"),
        ((2, 4, 4, 5, 100, 64), "added", False, "sdpa_vector_T_64_64_maskT"),
        ((1, 2, 2, 5, 1100, 64), None, False, "sdpa_vector_2pass_1_T_64_64_masknone"),
    ],
)
def test_short_queries_take_one_pass_or_two(
    kernels: Dispatch, dtype: torch.dtype, shape: tuple[int, ...], mask: str | None, causal: bool, kernel: str
) -> None:
    attended(shape, dtype, mask, causal)
    element = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}[dtype]
    assert kernels.ledger.kernels[kernel.replace("T", element)] == 1
    assert kernels.ledger.operators[OPERATOR] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_two_passes_keep_is_float32_whatever_the_default_dtype_is(kernels: Dispatch, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        attended((1, 2, 2, 5, 1100, 64), torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert kernels.ledger.operators[OPERATOR] == 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shape", "mask", "causal", "kernel"),
    [
        ((2, 4, 2, 33, 70, 64), "boolean", False, "prefill_attention_T_bq32_bk32_bd64_wm4_wn1_hm1_dc0_maskbool_"),
        ((2, 2, 2, 40, 70, 32), None, True, "prefill_attention_T_bq32_bk32_bd32_wm4_wn1_hm0_dc1_maskT"),
    ],
)
def test_longer_queries_take_flash_attention(
    kernels: Dispatch, dtype: torch.dtype, shape: tuple[int, ...], mask: str | None, causal: bool, kernel: str
) -> None:
    attended(shape, dtype, mask, causal)
    assert kernels.ledger.kernels[kernel.replace("T", str(dtype).removeprefix("torch."))] == 1


@pytest.mark.parametrize(("size", "length"), [(48, 4), (48, 20), (64, 8)])
def test_heads_of_another_size_are_mpsgraphs(kernels: Dispatch, size: int, length: int) -> None:
    attended((1, 2, 2, length, length, size), torch.float32)
    covered = size == 64
    assert kernels.ledger.operators[OPERATOR] == covered
    assert kernels.ledger.reasons[OPERATOR, "MPSGraph on this release"] == (not covered)


def test_one_mask_for_all_heads_and_batches_is_read_by_its_strides(kernels: Dispatch) -> None:
    attended((2, 4, 4, 5, 100, 64), torch.float32, "boolean for all")
    attended((2, 4, 4, 20, 40, 64), torch.float32, "boolean for all")
    assert kernels.ledger.operators[OPERATOR] == 2


def test_queries_that_are_transposed_are_read_where_they_lie(kernels: Dispatch) -> None:
    given = torch.randn(2, 20, 4, 64, generator=torch.Generator().manual_seed(0))
    wanted = torch.nn.functional.scaled_dot_product_attention(*[given.transpose(1, 2)] * 3)
    on = given.to("mps").transpose(1, 2)
    found = torch.nn.functional.scaled_dot_product_attention(on, on, on)
    assert kernels.ledger.operators[OPERATOR] == 1
    torch.testing.assert_close(found.cpu(), wanted, rtol=2e-6, atol=2e-6)
