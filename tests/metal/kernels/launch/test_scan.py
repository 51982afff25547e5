"""Cumulative operations and group norm run PyTorch's own Metal kernels for every shape that the host tells apart."""

from __future__ import annotations

import pytest
import torch

from hf_mps.layer import guards
from hf_mps.metal.device import machine, profiles
from hf_mps.metal.kernels.rules import Dispatch
from hf_mps.metal.simulator import strictness

BLOCKS = ["cumsum_block_reduce_float", "cumsum_block_carry_float"]


@pytest.mark.parametrize(
    ("shape", "dim", "launched"),
    [
        ((3, 50), 1, ["cumsum_innermost_float"]),
        ((50, 3), 0, ["cumsum_outer_float"]),
        ((5000, 20), 1, ["cumsum_tiny_innermost_float"]),
        ((3, 70000), 1, BLOCKS),
        ((5000, 3), 0, ["cumsum_vec_block_reduce_3_float", "cumsum_vec_block_carry_3_float"]),
        (
            (5000, 20),
            0,
            [
                "cumsum_strided_block_reduce_24_float",
                "cumsum_scan_block_sums_float",
                "cumsum_strided_block_carry_24_float",
            ],
        ),
    ],
)
def test_the_shape_decides_how_many_threadgroups_share_an_axis(
    kernels: Dispatch, shape: tuple[int, ...], dim: int, launched: list[str]
) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on_device = given.to("mps")
    kernels.ledger.clear()
    found = on_device.cumsum(dim)
    assert list(kernels.ledger.kernels.elements()) == launched
    torch.testing.assert_close(found.cpu().double(), given.double().cumsum(dim), rtol=1e-4, atol=1e-3)


def test_a_transposed_tensor_is_scanned_without_a_copy(kernels: Dispatch) -> None:
    given = torch.randn(60, 500, generator=torch.Generator().manual_seed(0))
    on_device = given.to("mps")
    kernels.ledger.clear()
    found = on_device.t().cumsum(1)
    assert dict(kernels.ledger.kernels) == {"cumsum_innermost_transposed_float": 1}
    torch.testing.assert_close(found.cpu().double(), given.t().double().cumsum(1), rtol=1e-4, atol=1e-4)


def test_newer_chips_scan_in_one_pass_that_looks_back(kernels: Dispatch) -> None:
    given = torch.randn(3, 70000, generator=torch.Generator().manual_seed(0))
    before = machine.present()
    machine.override(profiles.get("m4-max-64gb").machine())
    try:
        found = given.to("mps").cumsum(1)
    finally:
        machine.override(before)
    assert kernels.ledger.kernels["cumsum_contig_decoupled_float"] == 1
    torch.testing.assert_close(found.cpu().double(), given.double().cumsum(1), rtol=1e-4, atol=1e-2)


def test_masks_are_summed_into_int64_by_the_kernel(kernels: Dispatch) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    for dtype in (torch.bool, torch.int32, torch.int64):
        torch.testing.assert_close(mask.to(dtype).to("mps").cumsum(-1).cpu(), mask.cumsum(-1))
    assert kernels.ledger.kernels["cumsum_innermost_int_long"] == 2
    assert kernels.ledger.operators["cumsum"] == 3


def test_writing_over_the_input_keeps_its_dtype(kernels: Dispatch) -> None:
    numbers = torch.arange(6, dtype=torch.int32, device="mps")
    numbers.cumsum_(0)
    assert numbers.tolist() == [0, 1, 3, 6, 10, 15]
    assert kernels.ledger.operators["cumsum_"] == 1


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_group_norm_of_bfloat16_takes_weights_of_either_dtype(kernels: Dispatch, weights: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(2, 6, 5, 4, generator=draw).to(torch.bfloat16)
    scale, shift = (torch.randn(6, generator=draw).to(weights) for _ in range(2))

    def normed(device: str) -> list[torch.Tensor]:
        given = [each.to(device).requires_grad_() for each in (image, scale, shift)]
        result = torch.nn.functional.group_norm(given[0], 3, given[1], given[2])
        return [result, *torch.autograd.grad(result.float().square().sum(), given)]

    for found, wanted in zip(normed("mps"), normed("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=4e-2, atol=4e-2)
    assert kernels.ledger.operators["native_group_norm"] == 1
    assert kernels.ledger.operators["native_group_norm_backward"] == 1


def test_where_the_kernel_would_write_over_other_tensors_it_does_not_run(kernels: Dispatch) -> None:
    rows = torch.arange(100.0).view(10, 10)
    with guards.suspended("lone-scans"):
        assert torch.equal(rows.to("mps")[:1, :7].cumsum(0).cpu(), rows[:1, :7])
    assert kernels.ledger.reasons["cumsum", "its kernel would write beyond the result"] == 1


def test_of_one_row_the_kernel_writes_as_many_columns_as_the_stride_says(kernels: Dispatch) -> None:
    row = torch.arange(1.0, 34.0).view(33, 1).to("mps").t()
    with guards.suspended("lone-scans"), strictness.off("lone-scans"):
        found = torch.cumsum(row, 0, out=torch.zeros(1, 33, device="mps"))
    assert kernels.ledger.kernels["cumsum_outer_float"] == 1
    assert found.tolist() == [[1.0] + [0.0] * 32], "PyTorch's own kernel has no fault"
