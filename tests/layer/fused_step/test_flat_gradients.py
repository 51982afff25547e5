"""Clipping and zeroing by few long tensors: the numbers are stock's, the tensors stay the user's."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from hf_mps.layer.fused_step import spans
from hf_mps.layer.fused_step.flat_gradients import FLAT_GRADIENTS
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


def address(tensor: torch.Tensor) -> int:
    """Of what a process knows its storage by."""
    return tensor.untyped_storage()._cdata


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
    for mine, theirs in zip(gradients(ours), gradients(stock), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2 * off + 1e-6 if acts else 0, atol=0)


def test_clipping_by_a_value_is_stocks(fused: Fused) -> None:
    stock, ours = parameters(), parameters()
    clip_grad_value_(stock, 0.3)
    with fused():
        clip_grad_value_(ours, 0.3)
    assert all(map(torch.equal, gradients(ours), gradients(stock)))


def test_a_norm_alone_and_a_scale_alone_are_stocks(fused: Fused) -> None:
    stock, ours = parameters(), parameters()
    clip_grads_with_norm_(stock, 1.0, get_total_norm([each.grad for each in stock]))
    with fused():
        clip_grads_with_norm_(ours, 1.0, get_total_norm([each.grad for each in ours]))
    assert all(map(torch.equal, gradients(ours), gradients(stock)))


def test_small_gradients_cost_no_launch_each(fused: Fused) -> None:
    ours = parameters()
    with fused(), simulator.counted() as first:
        clip_grad_norm_(ours, 1.0)
    stock = parameters()
    with simulator.counted() as before:
        clip_grad_norm_(stock, 1.0)
    assert first.waits == before.waits == 0
    storages = {each.grad.untyped_storage().data_ptr() for each in ours if each.grad.nbytes <= spans.SMALL}
    assert len(storages) == 1
    assert first.launches < before.launches


def test_a_gradient_stays_the_tensor_that_it_was(fused: Fused) -> None:
    ours = parameters()
    held = [each.grad for each in ours]
    with fused():
        clip_grad_norm_(ours, 0.1)
    assert all(each.grad is one for each, one in zip(ours, held, strict=True))
    assert all(each.grad.shape == each.shape and each.grad.is_contiguous() for each in ours)


def test_a_gradient_that_others_look_into_stays_where_it_is(fused: Fused) -> None:
    ours = parameters()
    through = ours[1].grad.view(8, 8)
    with fused():
        clip_grad_norm_(ours, 0.1)
    assert torch.equal(through.view(-1), ours[1].grad)
    assert ours[1].grad.untyped_storage().nbytes() == ours[1].grad.nbytes


def test_gathering_takes_memory_for_one_buffer_alone(fused: Fused) -> None:
    size, buffer = 2**18, 2**21
    tensors = [torch.full((size // 4,), float(number), device="mps") for number in range(32)]
    held = torch.mps.current_allocated_memory()
    simulator.reset_peak_memory()
    long = spans.gather(tensors, buffer=buffer)
    assert simulator.peak_memory() - held <= buffer + 4096
    assert torch.mps.current_allocated_memory() - held <= 4096
    assert [each.nbytes for each in long] == [buffer] * 4
    assert all(bool((each == number).all()) for number, each in enumerate(tensors))


def test_a_norm_is_the_same_wherever_gradients_lie(fused: Fused) -> None:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(300, 1000, generator=draw) * 3.7**number for number in range(6)]  # too long to be moved
    found = []
    for upwards in (True, False):
        places = sorted((torch.empty(300, 1000, device="mps") for _ in values), key=address, reverse=not upwards)
        for place, of in zip(places, values, strict=True):
            place.copy_(of)
        assert all(map(operator.is_, spans.spans(places), places))
        with fused():
            found.append(get_total_norm(places).item())
    assert found[0] == found[1]


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
    held: Any = [each.grad for each in trained.parameters()]
    with fused(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FLAT_GRADIENTS, "devices", frozenset({device}))
        trained.zero_grad(set_to_none=False)
        ours = clipped(trained)
    assert ours == clipped(trained)
    assert [bool((each.grad.to_dense() == 0).all()) for each in trained.parameters()] == [True] * 3
    assert all(each.grad is one for each, one in zip(trained.parameters(), held, strict=True))


def test_gradients_in_another_order_of_memory_keep_it(fused: Fused) -> None:
    stock, ours = parameters(), parameters()
    for several in (stock, ours):
        several[0].grad = several[0].grad.t().contiguous().t()
    clip_grad_norm_(stock, 0.5)
    with fused():
        clip_grad_norm_(ours, 0.5)
    assert ours[0].grad.stride() == stock[0].grad.stride() != ours[0].stride()
    for mine, theirs in zip(gradients(ours), gradients(stock), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


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


def test_large_gradients_are_multiplied_in_a_dispatch_each(fused: Fused) -> None:
    def large() -> list[Any]:
        made = [torch.nn.Parameter(torch.zeros(600, 500, device="mps")) for _ in range(6)]
        for number, each in enumerate(made):
            each.grad = torch.full_like(each, number + 1.0)
        return made

    stock, ours = large(), large()
    norm = clip_grad_norm_(stock, 1.0)
    with fused(), simulator.counted() as counts:
        found = clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(found.cpu(), norm.cpu(), rtol=1e-6, atol=0)
    for mine, theirs in zip(gradients(ours), gradients(stock), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    assert counts.operators["aten::mul_.Tensor"] == len(ours)
    assert "aten::_amp_foreach_non_finite_check_and_unscale_" not in counts.operators, "two of its dispatches for each"


def test_gradients_that_fill_a_storage_together_move_together() -> None:
    whole, other = torch.ones(30, device="mps"), torch.ones(7, device="mps")
    several = spans.pieces(whole, (10, 20), 0)
    looking = whole.view(5, 6)
    del whole
    assert {each.numel() for each in spans.gather([*several, other])} == {30, 7}, "somebody looks into it"
    del looking
    assert [each.numel() for each in spans.gather([*several, other])] == [37]
