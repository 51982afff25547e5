"""Bags of embeddings run Metal's kernels, forward and backward, with the CPU's results."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("integer", "padding"), [(torch.int64, None), (torch.int32, 3)], ids=str)
def test_bags_and_their_gradients_are_the_cpus(
    kernels: Dispatch, mode: str, dtype: torch.dtype, integer: torch.dtype, padding: int | None
) -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(11, 6, generator=draw).to(dtype)
    indices = torch.randint(0, 11, (20,), generator=draw).to(integer)
    offsets = torch.tensor([0, 4, 4, 9, 15], dtype=integer)
    grad = torch.randn(5, 6, generator=draw).to(dtype)

    def run(device: str, kind: torch.dtype) -> list[torch.Tensor]:
        weight = table.to(device, kind).requires_grad_()
        bags = torch.nn.functional.embedding_bag(
            indices.to(device), weight, offsets.to(device), mode=mode, padding_idx=padding
        )
        bags.backward(grad.to(device, kind))
        return [bags.detach().cpu().double(), weight.grad.cpu().double()]

    found, wanted = run("mps", dtype), run("cpu", torch.float64)
    assert kernels.ledger.operators["_embedding_bag"] == 1
    assert kernels.ledger.operators["_embedding_bag_backward"] == 1
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_weights_of_samples_have_gradients_too(kernels: Dispatch) -> None:
    table, weights = torch.randn(11, 6), torch.randn(8)
    indices, offsets = torch.randint(0, 11, (8,)), torch.tensor([0, 3, 8])

    def run(device: str) -> list[torch.Tensor]:
        given = [table.to(device).requires_grad_(), weights.to(device).requires_grad_()]
        bags = torch.nn.functional.embedding_bag(
            indices.to(device),
            given[0],
            offsets.to(device),
            mode="sum",
            per_sample_weights=given[1],
            include_last_offset=True,
        )
        bags.square().sum().backward()
        return [bags.detach().cpu(), *(each.grad.cpu() for each in given if each.grad is not None)]

    torch.testing.assert_close(run("mps"), run("cpu"), rtol=1e-4, atol=1e-5)
    assert kernels.ledger.operators["_embedding_bag_per_sample_weights_backward"] == 1


def test_without_gradients_the_same_kernel_runs(kernels: Dispatch) -> None:
    table = torch.randn(4, 3)
    with torch.no_grad():
        found = torch.nn.functional.embedding_bag(torch.tensor([[0, 1], [2, 2]]).to("mps"), table.to("mps"))
    torch.testing.assert_close(found.cpu(), torch.stack([table[:2].mean(0), table[2]]))
    assert kernels.ledger.kernels["embedding_bag_float_long"] == 1


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
