"""Attention in blocks gives the numbers of PyTorch's attention, forward and backward, and holds no scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_mps.layer.fused_step.attention.blockwise import attention
from hf_mps.layer.fused_step.attention.masks import Causal, Given
from hf_mps.metal import simulator
from tests.conftest import ON_A_MAC


class Case(NamedTuple):
    """Batch, heads, heads of the keys, queries, keys, width, width of the values; bytes of a block."""

    shape: tuple[int, int, int, int, int, int, int]
    budget: int
    kind: str = ""


CASES = (
    Case((2, 4, 4, 65, 65, 16, 16), 4 * 4000),
    Case((2, 4, 2, 65, 65, 16, 16), 4 * 900, "causal"),
    Case((2, 6, 2, 40, 70, 8, 8), 4 * 50, "bool"),
    Case((1, 4, 1, 70, 40, 8, 12), 4 * 5000, "bool"),
    Case((3, 2, 2, 33, 33, 16, 16), 4 * 700, "added"),
    Case((2, 4, 2, 130, 130, 16, 16), 4 * 60000, "learned"),
)


def drawn(case: Case, device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Query, key and value as leaves, and a mask: bool with rows that see nothing, or added."""
    batch, heads, fewer, queries, keys, width, of_value = case.shape
    generator = torch.Generator("cpu").manual_seed(queries)

    def numbers(*size: int) -> torch.Tensor:
        made = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
        return made.to(device, dtype).requires_grad_()

    leaves = [numbers(batch, heads, queries, width)]
    leaves += [numbers(batch, fewer, keys, width), numbers(batch, fewer, keys, of_value)]
    mask = None
    if case.kind == "bool":
        mask = torch.rand(batch, 1, queries, keys, generator=generator, device="cpu") > 0.3
        mask[0, 0, 3:6] = False
        mask = mask.to(device)
    elif case.kind == "added":
        mask = numbers(batch, 1, queries, keys).detach()
    elif case.kind == "learned":
        mask = numbers(1, heads, queries, keys)
        leaves.append(mask)
    return leaves, mask


def in_blocks(case: Case, leaves: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    seen = Given(mask) if case.kind == "bool" and mask is not None else Causal() if case.kind == "causal" else None
    bias = mask if case.kind in ("added", "learned") else None
    return attention(*leaves[:3], seen, bias=bias, budget=case.budget)


def by_pytorch(case: Case, leaves: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    return scaled_dot_product_attention(*leaves[:3], mask, is_causal=case.kind == "causal", enable_gqa=True)


def numbers_of(
    function: Callable[..., torch.Tensor], case: Case, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The output and the gradients of all leaves, in float64 on the CPU."""
    leaves, mask = drawn(case, device, dtype)
    out = function(case, leaves, mask)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cpu").view(out.shape).sin()
    gradients = torch.autograd.grad(out, leaves, upstream.to(device, dtype))
    return [each.detach().to("cpu").double() for each in (out, *gradients)]


def furthest(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind or 'plain'}-{case.budget}")
def test_output_and_gradients_are_pytorchs(case: Case) -> None:
    right = numbers_of(by_pytorch, case, "cpu", torch.float64)
    assert furthest(numbers_of(in_blocks, case, "cpu", torch.float64), right) < 1e-12
    assert furthest(numbers_of(in_blocks, case, "mps", torch.float32), right) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    case = Case((2, 4, 2, 200, 200, 32, 32), 4 * 9000, "causal")
    right = numbers_of(by_pytorch, case, "cpu", torch.float64)
    pytorchs = furthest(numbers_of(by_pytorch, case, "mps", dtype), right)
    assert furthest(numbers_of(in_blocks, case, "mps", dtype), right) < 1.1 * pytorchs


def test_gradients_pass_pytorchs_own_check_with_dropout_too() -> None:
    case = Case((1, 2, 1, 5, 6, 3, 2), 4 * 20, "bool")
    leaves, mask = drawn(case, "cpu", torch.float64)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)  # the same draws at every point
        assert mask is not None
        return attention(*tensors, Given(mask), dropout=0.4, budget=case.budget)

    assert torch.autograd.gradcheck(call, leaves)


def test_the_backward_pass_draws_as_the_forward_did_and_leaves_the_generator_alone() -> None:
    def run(budget: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(7)
        leaf = torch.ones(1, 2, 96, 4, device="mps", requires_grad=True)
        out = attention(torch.ones_like(leaf), torch.ones_like(leaf), leaf, dropout=0.25, budget=budget)
        torch.rand(100, device="mps")  # somebody draws in between
        before = torch.mps.get_rng_state()
        out.sum().backward()
        assert torch.equal(before, torch.mps.get_rng_state())
        return out.detach().cpu(), leaf.grad.cpu(), before

    out, gradient, _ = run(4 * 96 * 32)
    # Alike keys and queries: an output is the share of what was kept, and so is a gradient's sum.
    assert torch.allclose(gradient.sum((2, 3)), out.sum((2, 3)), rtol=1e-5)
    assert 0.95 < float(out.mean()) < 1.05
    assert float(out.std()) > 0.01
    again = run(4 * 96 * 32)
    assert torch.equal(out, again[0])
    assert torch.equal(gradient, again[1])


def test_a_query_that_sees_nothing_gets_zeros_and_gives_none() -> None:
    leaf = torch.randn(1, 1, 4, 8, device="mps", requires_grad=True)
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device="mps")
    out = attention(leaf, leaf, leaf, Given(mask))
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert not out.any()
    assert not gradient.any()


def test_numbers_that_are_none_stay_so() -> None:
    leaf = torch.ones(1, 1, 4, 8, device="mps")
    leaf[0, 0, 1, 0] = math.nan
    assert torch.isnan(attention(leaf, leaf, leaf)).all()


@pytest.mark.skipif(ON_A_MAC, reason="PyTorch has no peak of Metal's memory; the simulated device counts it")
def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    def peak(length: int, function: Callable[..., Any], **settings: Any) -> int:
        leaves = [torch.randn(1, 4, length, 64, device="mps", requires_grad=True) for _ in range(3)]
        before = torch.mps.current_allocated_memory()
        simulator.reset_peak_memory()
        out = function(*leaves, **settings)
        out.backward(torch.ones_like(out))
        return simulator.peak_memory() - before

    short, long = (peak(length, attention, budget=2**20) for length in (512, 1024))
    assert long < 2 * short
    assert long < peak(1024, scaled_dot_product_attention) / 4
