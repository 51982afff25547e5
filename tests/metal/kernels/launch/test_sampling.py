"""Permutations, categories and numbers of gamma and Dirichlet distributions come of Metal's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.philox import stream

SEED = 5


@pytest.mark.rotated
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 2, 100, 384, 385, 5000, 1 << 15, 70_000])
def test_a_permutation_has_every_number_once(kernels: Dispatch, n: int, dtype: torch.dtype) -> None:
    torch.mps.manual_seed(SEED)
    found = torch.randperm(n, dtype=dtype, device="mps")
    again = torch.randperm(n, dtype=dtype, device="mps")
    assert kernels.ledger.operators["randperm.generator_out"] == 2
    assert torch.equal(found.cpu().sort().values, torch.arange(n).to(dtype))
    assert n < 3 or not torch.equal(found.cpu(), again.cpu())


@pytest.mark.parametrize(
    ("n", "moved"), [(1, 0), (2, 1), (6, 2), (384, 96), (1000, 250), (1 << 15, (1 << 13) + (1 << 15))]
)
def test_a_permutation_moves_the_generator_by_what_its_kernels_take(kernels: Dispatch, n: int, moved: int) -> None:
    generator = torch.Generator("mps").manual_seed(SEED)
    torch.randperm(n, generator=generator, device="mps")
    assert generator.get_offset() == moved


def test_many_numbers_are_in_the_order_of_keys_of_24_bits(kernels: Dispatch) -> None:
    n = 1 << 15
    generator = torch.Generator("mps").manual_seed(SEED)
    found = torch.randperm(n, generator=generator, device="mps").cpu().numpy()
    keys = stream(SEED, 0, n // 4).ravel() & 0xFFFFFF
    assert (np.diff(keys[found].astype(np.int64)) >= 0).all()
    assert kernels.ledger.kernels["randperm_dedup_islands_long"] == 1


def test_every_order_of_few_numbers_is_as_frequent(kernels: Dispatch) -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(600):
        order = tuple(torch.randperm(3, generator=torch.Generator("mps").manual_seed(seed), device="mps").tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(60 < each < 140 for each in counts.values())


@pytest.mark.parametrize(("samples", "replacement"), [(1, False), (4000, True)])
def test_categories_are_drawn_as_often_as_they_weigh(kernels: Dispatch, samples: int, replacement: bool) -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 1.0]).expand(3 if samples > 1 else 4000, 4).contiguous().to("mps")
    torch.mps.manual_seed(SEED)
    found = torch.multinomial(weights, samples, replacement).cpu().ravel()
    shares = torch.bincount(found, minlength=4) / len(found)
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.25, 0.5, 0.25]), rtol=0, atol=0.03)
    assert kernels.ledger.operators["multinomial"] == 1


def test_without_replacement_no_category_comes_twice(kernels: Dispatch) -> None:
    found = torch.multinomial(torch.ones(7, 9, device="mps"), 5).cpu()
    assert found.shape == (7, 5)
    assert all(len(set(row.tolist())) == 5 for row in found)
    assert kernels.ledger.operators["multinomial"] == 1


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_weights_that_pytorch_refuses_it_refuses_itself(kernels: Dispatch, weights: list[float]) -> None:
    with pytest.raises(RuntimeError, match="prob"):
        torch.multinomial(torch.tensor(weights, device="mps"), 1)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_gamma_numbers_have_their_mean_and_variance(kernels: Dispatch, shape: float) -> None:
    torch.mps.manual_seed(SEED)
    alpha = torch.full((20_000,), shape, device="mps")
    found = torch._standard_gamma(alpha).cpu()
    assert abs(float(found.mean()) - shape) < 0.06 * max(1.0, shape)
    assert abs(float(found.var()) - shape) < 0.12 * max(1.0, shape)
    assert kernels.ledger.kernels["standard_gamma_float"] == 1
    assert torch.mps._get_default_mps_generator().get_offset() == 32 * 20_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_dirichlet_row_sums_to_one(kernels: Dispatch, dtype: torch.dtype) -> None:
    found = torch._sample_dirichlet(torch.tensor([[0.5, 1.0, 3.0]] * 50, device="mps", dtype=dtype)).cpu().float()
    torch.testing.assert_close(found.sum(-1), torch.ones(50), rtol=0, atol=2e-2)
    assert kernels.ledger.operators["_sample_dirichlet"] == 1


def test_gradients_of_gamma_and_dirichlet_are_the_cpus(kernels: Dispatch) -> None:
    alpha, x = torch.linspace(0.2, 6, 40), torch.linspace(0.1, 5, 40)
    found = torch._standard_gamma_grad(alpha.to("mps"), x.to("mps")).cpu()
    torch.testing.assert_close(found, torch._standard_gamma_grad(alpha, x), rtol=1e-4, atol=1e-5)
    part, total = torch.linspace(0.05, 0.9, 40), alpha + 2
    found = torch._dirichlet_grad(part.to("mps"), alpha.to("mps"), total.to("mps")).cpu()
    torch.testing.assert_close(found, torch._dirichlet_grad(part, alpha, total), rtol=1e-3, atol=1e-4)
    assert kernels.ledger.operators["_standard_gamma_grad"] == kernels.ledger.operators["_dirichlet_grad"] == 1
