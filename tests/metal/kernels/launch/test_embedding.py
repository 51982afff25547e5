"""Gradients of embeddings run Metal's kernels, with the CPU's result."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("integer", "padding", "by_frequency"), [(torch.int64, -1, False), (torch.int32, 2, False), (torch.int64, 2, True)]
)
def test_rows_collect_their_gradients(
    kernels: Dispatch, dtype: torch.dtype, integer: torch.dtype, padding: int, by_frequency: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 9, (4, 25), generator=draw).to(integer)
    grad = torch.randn(4, 25, 12, generator=draw).to(dtype)
    arguments = (11, padding, by_frequency)
    found = torch.ops.aten.embedding_dense_backward(grad.to("mps"), indices.to("mps"), *arguments)
    wanted = torch.ops.aten.embedding_dense_backward(grad.double(), indices.long(), *arguments)
    assert kernels.ledger.operators["embedding_dense_backward"] == 1
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_gradients_and_indices_of_any_layout(kernels: Dispatch) -> None:
    indices = torch.randint(0, 9, (6, 5)).t()
    grad = torch.randn(7, 5, 6).permute(1, 2, 0)
    found = torch.ops.aten.embedding_dense_backward(grad.to("mps"), indices.to("mps"), 9, -1, False)
    spread = torch.randn(5, 6, 14)
    spread[..., ::2] = grad
    with_gaps = torch.ops.aten.embedding_dense_backward(spread.to("mps")[..., ::2], indices.to("mps"), 9, -1, False)
    wanted = torch.ops.aten.embedding_dense_backward(grad, indices, 9, -1, False)
    assert kernels.ledger.operators["embedding_dense_backward"] == 2
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(with_gaps.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_no_indices_give_zeros(kernels: Dispatch) -> None:
    grad, indices = torch.empty(0, 3, device="mps"), torch.empty(0, dtype=torch.int64, device="mps")
    found = torch.ops.aten.embedding_dense_backward(grad, indices, 4, -1, False)
    assert torch.equal(found.cpu(), torch.zeros(4, 3))
