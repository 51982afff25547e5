"""Attention in few launches: stock's numbers with every mask, its gradients, and dropout that both ways share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from hf_mps.layer.fused_step import short_attention
from hf_mps.layer.fused_step.short_attention import SHORT_ATTENTION
from hf_mps.layer.guards.platform import batches
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

pytestmark = pytest.mark.usefixtures("way")
BATCH, HEADS, PLACES, WIDTH = 2, 3, 6, 4


def same(found: Any, expected: Any, way: str) -> None:
    """PyTorch's operators give stock's numbers to the bit, a kernel's sums come in another order."""
    for mine, theirs in zip(found, expected, strict=True):
        apart = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30)
        assert float(apart) <= (0 if way == "operators" else 2e-6 if mine.dtype == torch.float32 else 1e-2)


def inputs(dtype: torch.dtype = torch.float32, *, joined: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves (batch, places, heads x width), or one of all three; and queries, keys and values of them."""
    draw = torch.Generator().manual_seed(0)
    width = HEADS * WIDTH
    leaves = [torch.randn(BATCH, PLACES, width, generator=draw) for _ in range(3)]
    leaves = [torch.cat(leaves, -1)] if joined else leaves
    leaves = [each.to("mps", dtype).requires_grad_() for each in leaves]
    parts = leaves[0].unsafe_split(width, -1) if joined else leaves
    return leaves, [each.view(BATCH, PLACES, HEADS, WIDTH).transpose(1, 2) for each in parts]


def trained(context: AbstractContextManager[None], dtype: torch.dtype, joined: bool, **how: Any) -> list[Tensor]:
    """The output and the leaves' gradients, on the host."""
    leaves, given = inputs(dtype, joined=joined)
    with context:
        out = attention(*given, **how)
        (out.transpose(1, 2).reshape(BATCH, PLACES, -1) * torch.arange(12, device="mps")).sum().backward()
    return [out.detach().cpu(), *(each.grad.cpu() for each in leaves if each.grad is not None)]


def masks() -> dict[str, dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    full = torch.rand(BATCH, 1, PLACES, PLACES, generator=draw) > 0.4
    padding = torch.rand(BATCH, 1, 1, PLACES, generator=draw) > 0.3
    nothing = full.clone()
    nothing[0, 0, 2] = False
    found = {"of all": full, "padding": padding, "of two dimensions": full[0, 0], "a row that sees nothing": nothing}
    return {"none": {}, "causal": {"is_causal": True}, "scaled": {"scale": 0.3}} | {
        name: {"attn_mask": mask.to("mps")} for name, mask in found.items()
    }


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", masks())
def test_output_and_gradients_are_stocks(name: str, dtype: torch.dtype, joined: bool, fused: Fused, way: str) -> None:
    how = masks()[name]
    expected = trained(nullcontext(), dtype, joined, **how)
    found = trained(fused(), dtype, joined, **how)
    same(found, expected, way)
    if name == "a row that sees nothing":
        assert not found[0][0, :, 2].any()


@pytest.mark.parametrize("name", masks())
def test_heads_that_share_keys_are_stocks(name: str, fused: Fused, way: str) -> None:
    found = []
    for context in (nullcontext(), fused()):
        leaves, (query, key, value) = inputs()
        with context, simulator.counted() as counts:
            out = attention(query, key[:, :1], value[:, :1], enable_gqa=True, **masks()[name])
        out.square().sum().backward()
        found.append(
            (counts.launches, out.detach().cpu(), *(each.grad.cpu() for each in leaves if each.grad is not None))
        )
    assert found[1][0] < found[0][0]
    same(found[1][1:], found[0][1:], way)


def test_it_launches_half_as_much_and_makes_a_mask_once_for_all_layers(fused: Fused, way: str) -> None:
    def launches(mask: Tensor | None) -> int:
        _, given = inputs()
        with simulator.counted() as counts:
            # As a model's layers are given one: each a view of its own.
            attention(*given, attn_mask=None if mask is None else mask[:, :, :, :PLACES])
        return counts.launches

    mask = masks()["padding"]["attn_mask"]
    assert [launches(mask), launches(mask)] == [16, 16]
    with fused():
        first, second = launches(mask), launches(mask)
        if way == "kernel":
            assert (first, second, launches(None)) == (1, 1, 1)
        else:
            assert first > second == 8
            assert launches(None) == 7, "with the copy that a model's layers make of stock's result"


def test_a_kernel_keeps_no_scores(fused: Fused, way: str) -> None:
    if way == "operators":
        return
    _, given = inputs()
    with (
        fused(),
        torch.autograd.graph.saved_tensors_hooks(lambda kept: sizes.append(kept.numel()) or kept, lambda x: x),
    ):
        sizes: list[int] = []
        attention(*given, dropout_p=0.5)
    assert sorted(sizes) == [BATCH * HEADS * PLACES] + 4 * [BATCH * HEADS * PLACES * WIDTH]


def test_a_mask_that_is_changed_is_made_anew(fused: Fused) -> None:
    mask = torch.ones(BATCH, 1, 1, PLACES, dtype=torch.bool, device="mps")
    with fused():
        attention(*inputs()[1], attn_mask=mask)
        mask[:, :, :, 3:] = False
        found = attention(*inputs()[1], attn_mask=mask)
    torch.testing.assert_close(found, attention(*inputs()[1], attn_mask=mask))


def test_a_mask_that_is_changed_before_the_backward_pass_gives_no_wrong_gradient(fused: Fused, way: str) -> None:
    mask = torch.ones(BATCH, 1, 1, PLACES, dtype=torch.bool, device="mps")
    leaves, given = inputs()
    (expected,) = torch.autograd.grad(attention(*given, attn_mask=mask).square().sum(), leaves[:1])
    with fused():
        out = attention(*given, attn_mask=mask)
    mask[:, :, :, 3:] = False
    if way == "kernel":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        (found,) = torch.autograd.grad(out.square().sum(), leaves[:1])
        assert torch.equal(found, expected)


def used(query: Tensor, **how: Any) -> Tensor:
    """The chances that are multiplied by values, of values that show them."""
    values = torch.eye(query.shape[2], device="mps").expand(*query.shape[:2], -1, -1)
    return attention(query, query, values, **how)


def test_dropout_drops_as_many_and_the_gradient_knows_which(fused: Fused) -> None:
    torch.manual_seed(0)
    query = torch.zeros(8, 4, 32, 32, device="mps", requires_grad=True)
    values = torch.eye(32, device="mps").repeat(8, 4, 1, 1).requires_grad_()
    with fused():
        chances = attention(query, query, values, dropout_p=0.25)
        chances.sum().backward()
    found = chances.detach().cpu()
    from scipy import stats

    assert stats.binomtest(int((found != 0).sum()), found.numel(), 0.75).pvalue > 1e-4
    torch.testing.assert_close(found.unique(), torch.tensor([0, 1 / 32 / 0.75]))
    # Each value's gradient is the sum of the chances by which it was multiplied.
    torch.testing.assert_close(values.grad.cpu()[..., 0], found.sum(-2))


def test_dropouts_gradient_is_that_of_the_same_mask(fused: Fused) -> None:
    leaves, given = inputs()
    with fused():
        torch.manual_seed(4)
        attention(*given, dropout_p=0.5).sum().backward()
        torch.manual_seed(4)
        others, given = inputs()
        # Finite differences of the same draws.
        step = 1e-2
        for leaf, other in zip(leaves, others, strict=True):
            results: list[float] = []
            for sign in (1, -1):
                with torch.no_grad():
                    other[0, 1, 2] += sign * step
                torch.manual_seed(4)
                results.append(attention(*given, dropout_p=0.5).sum().item())
                with torch.no_grad():
                    other[0, 1, 2] -= sign * step
            assert (results[0] - results[1]) / (2 * step) == pytest.approx(leaf.grad[0, 1, 2].item(), abs=2e-3)


def test_a_gradient_of_a_gradient_is_stocks(fused: Fused) -> None:
    leaves, given = inputs()
    mask = masks()["padding"]["attn_mask"]
    families.same_second_gradients(fused, lambda *_: attention(*given, attn_mask=mask), *leaves, tolerance=1e-4)


def test_checkpointing_repeats_it(fused: Fused) -> None:
    found = []
    for again in (False, True):
        leaves, given = inputs()
        torch.manual_seed(2)
        with fused():
            out: Any = (
                checkpoint(attention, *given, dropout_p=0.5, use_reentrant=False)
                if again
                else attention(*given, dropout_p=0.5)
            )
            out.square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


STOCKS: dict[str, Callable[[], Tensor]] = {
    "a mask of floats": lambda: attention(*inputs()[1], attn_mask=torch.zeros(PLACES, PLACES, device="mps")),
    "no gradient": lambda: attention(*(each.detach() for each in inputs()[1])),
    "three dimensions": lambda: attention(*(each[:, 0] for each in inputs()[1])),
    "the host": lambda: attention(*(torch.ones(1, 2, 3, 4, requires_grad=True),) * 3),
}


@pytest.mark.parametrize("name", STOCKS)
def test_these_run_as_stock_does(name: str, fused: Fused) -> None:
    expected = STOCKS[name]()
    with fused():
        found = STOCKS[name]()
    assert torch.equal(found, expected)
    assert type(found.grad_fn) is type(expected.grad_fn)


def test_a_wrong_call_is_refused_in_torchs_words(fused: Fused) -> None:
    query, key, value = inputs()[1]
    with fused(), pytest.raises(RuntimeError, match="same dtype"):
        attention(query, key.half(), value)
    assert not SHORT_ATTENTION.broken


@pytest.mark.parametrize(
    ("host", "all_see"), [([[1, 1, 0], [1, 0, 0]], True), ([[1, 1, 0], [0, 0, 0]], False)], ids=["seen", "hidden"]
)
def test_whether_rows_are_hidden_whole_is_seen_on_the_host(host: list[list[int]], all_see: bool) -> None:
    there = torch.tensor(host, device="mps").bool()
    batches.BATCH_WAITS.moved([(there, torch.tensor(host).bool())])
    mask = there[:, None, None, :].expand(-1, 1, 3, -1)
    with simulator.counted() as counts:
        assert short_attention._all_see(mask, there) is all_see
        assert not short_attention._all_see(mask[..., 1:], there), "another mask than the batch's"
    assert (counts.launches, counts.waits) == (0, 0)
    there.logical_not_()
    assert not short_attention._all_see(mask, there), "what was changed on the device nobody knows"
