"""Cholesky's factors and QR run Metal's kernels, with the CPU's result."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("size", [1, 33, 70])
def test_cholesky_walks_all_blocks_and_reads_one_triangle(kernels: Dispatch, size: int, upper: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(3, size, size, generator=draw)
    whole = root @ root.mT + size * torch.eye(size)
    given = (
        whole.triu() + torch.full_like(whole, 9.0).tril(-1) if upper else whole.tril() + 9.0 * (whole * 0 + 1).triu(1)
    )
    found, info = torch.linalg.cholesky_ex(given.to("mps"), upper=upper)
    wanted = torch.linalg.cholesky(whole.double(), upper=upper)
    assert kernels.ledger.operators["linalg_cholesky_ex"] == 1
    assert info.tolist() == [0, 0, 0]
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_matrix_that_is_not_positive_is_named(kernels: Dispatch) -> None:
    given = torch.diag(torch.tensor([1.0, 2.0, -3.0, 4.0])).to("mps")
    assert torch.linalg.cholesky_ex(given).info.item() == 3
    with pytest.raises(torch.linalg.LinAlgError, match="minor of order 3"):
        torch.linalg.cholesky(given)
    assert kernels.ledger.kernels["factorDiagonalBlockL"] == 2


@pytest.mark.parametrize("mode", ["reduced", "complete"])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (2, 3, 6, 6)], ids=str)
def test_qr_is_orthogonal_and_upper_and_makes_the_matrix(kernels: Dispatch, shape: tuple[int, ...], mode: str) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on = given.to("mps")
    found, upper = (each.cpu() for each in torch.linalg.qr(on, mode=mode))
    assert kernels.ledger.operators["linalg_qr"] == 1
    assert torch.equal(on.cpu(), given)
    torch.testing.assert_close(found @ upper, given, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        found.mT @ found, torch.eye(found.shape[-1]).expand(*shape[:-2], -1, -1), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(upper, upper.triu(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_writes_a_result_of_any_strides(kernels: Dispatch, upper: bool) -> None:
    root = torch.randn(2, 40, 40, generator=torch.Generator().manual_seed(0))
    given = root @ root.mT + 40 * torch.eye(40)
    whole, infos = torch.full((2, 40, 80), 7.0, device="mps"), torch.full((4,), 7, dtype=torch.int32, device="mps")
    torch.linalg.cholesky_ex(given.to("mps"), upper=upper, check_errors=True, out=(whole[..., ::2], infos[::2]))
    assert kernels.ledger.operators["linalg_cholesky_ex.L"] == 1
    wanted = torch.linalg.cholesky(given.double(), upper=upper)
    torch.testing.assert_close(whole[..., ::2].cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    assert (whole[..., 1::2].cpu() == 7).all()
    assert infos.tolist() == [0, 7, 0, 7]
