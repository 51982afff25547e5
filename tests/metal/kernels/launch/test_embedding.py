"""Embeddings, bags of them and their gradients run Metal's kernels, beside what PyTorch's samples try."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch


@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
def test_gradients_and_indices_of_any_layout(kernels: Dispatch, integer: torch.dtype) -> None:
    indices = torch.randint(0, 9, (6, 5), dtype=integer).t()
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


@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
def test_without_gradients_the_same_kernel_runs(kernels: Dispatch, integer: torch.dtype) -> None:
    table, bags = torch.randn(4, 3), torch.tensor([[0, 1], [2, 2]], dtype=integer)
    with torch.no_grad():
        found = torch.nn.functional.embedding_bag(bags.to("mps"), table.to("mps"))
    torch.testing.assert_close(found.cpu(), torch.stack([table[:2].mean(0), table[2]]))
    assert kernels.ledger.kernels[f"embedding_bag_float_{'long' if integer == torch.int64 else 'int'}"] == 1


def test_an_index_out_of_range_is_refused(kernels: Dispatch) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        torch.nn.functional.embedding_bag(torch.tensor([[9]]).to("mps"), torch.ones(4, 3, device="mps"))


def test_a_gradient_whose_forward_pass_ran_on_the_cpu_is_left_to_the_device(kernels: Dispatch) -> None:
    weight, indices, offsets = torch.randn(5, 3), torch.tensor([0, 4, 2]), torch.tensor([0, 1])
    grad, without = torch.randn(2, 3), torch.empty(0, dtype=torch.int64)
    given = [grad, weight, indices, offsets, without]
    found = torch.ops.aten._embedding_bag_per_sample_weights_backward(*(each.to("mps") for each in given), 0)
    torch.testing.assert_close(found.cpu(), torch.ops.aten._embedding_bag_per_sample_weights_backward(*given, 0))
    assert kernels.ledger.operators["_embedding_bag_per_sample_weights_backward"] == 0
