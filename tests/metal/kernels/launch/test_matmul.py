"""Products that PyTorch's host code keeps from MPSGraph run Metal kernels, with the CPU's result."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.samples import compared

OPERATORS = ["mm", "bmm", "addmm", "baddbmm", "addbmm"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_integers_agree_exactly(kernels: Dispatch, operator: str, dtype: torch.dtype) -> None:
    samples = compared(kernels, operator, dtype)
    assert samples.differ == []
    assert samples.ran == samples.taken > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("operator", ["mm", "addmm"])
def test_all_numbers_do_where_the_user_prefers_metal(
    kernels: Dispatch, monkeypatch: pytest.MonkeyPatch, operator: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("PYTORCH_MPS_PREFER_METAL", "1")
    samples = compared(kernels, operator, dtype)
    assert samples.differ == []
    assert samples.ran == samples.taken > 0


@pytest.mark.parametrize("operator", ["baddbmm", "addbmm"])
def test_complex_batches_are_added_by_metal(kernels: Dispatch, operator: str) -> None:
    samples = compared(kernels, operator, torch.complex64)
    # 2.13.0's kernel multiplies what it adds by a beta of 0 too; since 2.15 PyTorch's samples have infinities there.
    assert [line for line in samples.differ if not ("inf" in line and "'beta': 0" in line)] == []
    assert samples.ran == samples.taken > 0


def test_floats_are_mpsgraphs(kernels: Dispatch) -> None:
    given = torch.ones(4, 4, device="mps")
    assert torch.mm(given, given).sum() == 64
    assert kernels.ledger.operators["mm"] == 0
    assert kernels.ledger.reasons["mm", "MPSGraph on this release"] == 1


def test_half_rows_with_gaps_that_mpsgraph_reads_past_are_metals(kernels: Dispatch) -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(4, 40, generator=draw).half(), torch.randn(8, 60, generator=draw).half()
    wanted = first[:, :37].double() @ second[:, :37].double().T
    found = first.to("mps")[:, :37] @ second.to("mps")[:, :37].T
    assert kernels.ledger.kernels["matmul_half"] == 1
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=4e-3, atol=4e-3)


def test_strided_matrices_and_results_are_used_where_they_lie(kernels: Dispatch) -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randint(-9, 9, (20, 50), generator=draw) for _ in range(2))
    out = torch.zeros(40, 20, dtype=torch.int64, device="mps").T[:, 3:33:2]
    torch.mm(first.to("mps")[:, 5:40].contiguous()[:, 5:], second.to("mps")[:15, 5:35].T, out=out)
    assert kernels.ledger.operators["mm.out"] == 1
    assert torch.equal(out.cpu(), first[:, 10:40] @ second[:15, 5:35].T)
