"""Gradients' norm and clipping by a kernel: the numbers are stock's, the tensors stay the user's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from hf_mps.layer.fused_step.optimizer import GRADIENT_CLIP
from hf_mps.metal import simulator
from tests.layer.fused_step.conftest import Fused

SHAPES = ((300, 200), (64,), (3, 5), (1,), (7, 2, 4), (400, 300), (64,))


def parameters(dtype: torch.dtype = torch.float32, device: str = "mps") -> list[Any]:
    """Weights with gradients, each in a storage of its own, the same on every call."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for shape in SHAPES:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        parameter.grad = torch.randn(shape, generator=draw).to(device, dtype)
        made.append(parameter)
    return made


def gradients(parameters: list[Any]) -> list[torch.Tensor]:
    return [each.grad.detach().cpu().clone() for each in parameters]


def doubled(parameter: Any) -> Any:
    """The parameter and its gradient on the CPU in float64."""
    exact = torch.nn.Parameter(parameter.detach().cpu().double())
    exact.grad = parameter.grad.cpu().double()
    return exact


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf"), 0.0, float("-inf")])
@pytest.mark.parametrize("most", [0.5, 1e9])
def test_clipping_by_a_norm_is_stocks(fused: Fused, order: float, most: float) -> None:
    stock, ours = parameters(), parameters()
    exact = clip_grad_norm_([doubled(each) for each in stock], 1.0, order)
    expected = clip_grad_norm_(stock, most, order)
    with fused():
        found = clip_grad_norm_(iter(ours), most, order)
    # One long float32 sum, which stock takes, may be further from the truth.
    off = abs(float(expected) / float(exact) - 1)
    assert abs(float(found) / float(exact) - 1) <= max(off, 1e-6)
    acts = float(expected) > most
    torch.testing.assert_close(gradients(ours), gradients(stock), rtol=2 * off + 1e-6 if acts else 0, atol=0)


def test_a_norm_alone_and_a_scale_alone_are_stocks(fused: Fused) -> None:
    stock, ours = parameters(), parameters()
    clip_grads_with_norm_(stock, 1.0, get_total_norm([each.grad for each in stock]))
    with fused():
        clip_grads_with_norm_(ours, 1.0, get_total_norm([each.grad for each in ours]))
    torch.testing.assert_close(gradients(ours), gradients(stock), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("count", "dispatches"), [(28, 3), (29, 5), (100, 9)])
def test_28_gradients_share_a_dispatch_and_nothing_waits_or_moves(count: int, dispatches: int, fused: Fused) -> None:
    ours = [torch.nn.Parameter(torch.zeros(7, device="mps")) for _ in range(count)]
    for each in ours:
        each.grad = torch.ones_like(each)
    held = [(each.grad, each.grad.data_ptr()) for each in ours if each.grad is not None]
    with fused():
        clip_grad_norm_(ours, 1.0)  # what each dispatch reads is known from here on
        with simulator.counted() as counts:
            clip_grad_norm_(ours, 1e-3)
    assert (counts.launches, counts.blits, counts.waits) == (dispatches, 0, 0)
    assert all(each.grad is one and one.data_ptr() == at for each, (one, at) in zip(ours, held, strict=True))


def clipped(trained: torch.nn.Module) -> float | type[NotImplementedError]:
    """The norm that clipping returns, or its error: torch before 2.15 takes no norm of a sparse gradient."""
    try:
        return float(clip_grad_norm_(trained.parameters(), 1.0))
    except NotImplementedError:
        return NotImplementedError


def test_a_sparse_gradient_leaves_all_to_stock(fused: Fused) -> None:
    device = "cpu"  # Metal has no gradients of sparse embeddings that could be zeroed
    trained = torch.nn.ModuleList([torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 4)]).to(device)
    trained[1](trained[0](torch.arange(3, device=device))).sum().backward()
    same = copy.deepcopy(trained)
    for one, other in zip(same.parameters(), trained.parameters(), strict=True):
        one.grad = None if other.grad is None else other.grad.clone()
    held: Any = [each.grad for each in trained.parameters()]
    with fused(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRADIENT_CLIP, "devices", frozenset({device}))
        ours = clipped(trained)
    assert ours == clipped(same)
    assert all(each.grad is one for each, one in zip(trained.parameters(), held, strict=True))


def test_gradients_in_another_order_of_memory_keep_it(fused: Fused) -> None:
    stock, ours = parameters(), parameters()
    for several in (stock, ours):
        several[0].grad = several[0].grad.t().contiguous().t()
    clip_grad_norm_(stock, 0.5)
    with fused():
        clip_grad_norm_(ours, 0.5)
    assert ours[0].grad.stride() == stock[0].grad.stride() != ours[0].stride()
    torch.testing.assert_close(gradients(ours), gradients(stock), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_clipped_to_its_rounding(fused: Fused, dtype: torch.dtype) -> None:
    stock, ours = parameters(dtype), parameters(dtype)
    exact = torch.cat([each.flatten().double() for each in gradients(stock)]).norm()
    expected = clip_grad_norm_(stock, 1.0)
    with fused():
        found = clip_grad_norm_(ours, 1.0)
    assert found.dtype == expected.dtype == dtype
    assert abs(float(found) / float(exact) - 1) <= 2 * torch.finfo(dtype).eps


def test_infinite_gradients_are_told_as_stock_does(fused: Fused) -> None:
    ours = parameters()
    ours[3].grad.fill_(float("inf"))
    with fused(), pytest.raises(RuntimeError, match=r"The total norm of order 2.0 for gradients .* is non-finite"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


def test_what_is_said_of_foreach_and_empty_generators_is_stocks(fused: Fused) -> None:
    with fused():
        with pytest.raises(RuntimeError, match="foreach=True was passed, but can't use the foreach API on mps tensors"):
            clip_grad_norm_(parameters(), 1.0, foreach=True)
        with pytest.warns(UserWarning, match="empty generator"):
            clip_grad_norm_((each for each in ()), 1.0)


def test_a_norm_that_is_no_number_makes_every_gradient_none(fused: Fused) -> None:
    stock, ours = parameters(), parameters()
    for each in (stock, ours):
        each[3].grad.fill_(float("nan"))
    clip_grad_norm_(stock, 1.0)
    with fused():
        clip_grad_norm_(ours, 1.0)
    assert all(bool(each.isnan().all()) for each in (*gradients(stock), *gradients(ours)))


def test_a_kernel_that_lost_its_trial_leaves_all_to_stock(fused: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_TRAINING_KERNELS", "-clip")
    with fused(), simulator.counted() as counts:
        clip_grad_norm_(parameters(), 1.0)
    assert not any(name.startswith("metal::") for name in counts.operators)
    assert GRADIENT_CLIP.words(torch.nn.Linear(3, 3), "mps") == ""
