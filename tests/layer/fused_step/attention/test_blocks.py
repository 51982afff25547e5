"""A call of attention is cut into blocks: every pair of a query and a key that it may see, once, within the bytes."""

from __future__ import annotations

import pytest
import torch

from hf_mps.layer.fused_step.attention.masks import LENGTHS, SUMMED, Block, Shape, Span, cut

SHAPES = (
    Shape(1, 1, 1, 1, 1),
    Shape(2, 3, 2, 70, 70),
    Shape(5, 2, 4, 33, 190),
    Shape(1, 2, 1, 190, 33),
    Shape(3, 1, 7, 257, 257),
)
SPANS = (Span(), Span(after=0), Span(before=15, after=0), Span(9, 9), Span(before=20, after=3).shifted(5))


@pytest.mark.parametrize("budget", [4, 4_000, 400_000])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_hold_every_pair_that_is_seen_once(shape: Shape, span: Span, budget: int) -> None:
    seen = torch.zeros(shape.batch, shape.heads, shape.queries, shape.keys, dtype=torch.int32, device="cpu")
    for block in cut(shape, span, budget):
        seen[block] += 1
    queries = torch.arange(shape.queries, device="cpu")[:, None]
    keys = torch.arange(shape.keys, device="cpu")[None]
    allowed = torch.ones(shape.queries, shape.keys, dtype=torch.bool, device="cpu")
    if span.before is not None:
        allowed &= keys >= queries - span.before
    if span.after is not None:
        allowed &= keys <= queries + span.after
    assert seen.max() == 1
    assert bool((seen[..., allowed] == 1).all())


@pytest.mark.parametrize("budget", [4_000, 400_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_a_block_fit_the_bytes(shape: Shape, budget: int) -> None:
    for block in cut(shape, budget=budget):
        assert 4 * scores(block, shape) <= max(budget, 4 * shape.group * shape.keys)


def test_no_sum_is_longer_than_old_chips_add_up() -> None:
    for block in cut(Shape(1, 1, 8, 100_000, 16), budget=2**30):
        assert 8 * (block.queries.stop - block.queries.start) <= SUMMED


def test_a_causal_call_has_few_lengths_of_keys_and_leaves_out_almost_half() -> None:
    shape = Shape(1, 12, 1, 4096, 4096)
    blocks = list(cut(shape, Span(after=0)))
    assert len({block.keys.stop for block in blocks}) <= LENGTHS
    assert sum(scores(block, shape) for block in blocks) <= 0.6 * 12 * 4096**2


def test_a_window_takes_as_many_keys_for_each_query_however_long_the_row() -> None:
    widths = [max(b.keys.stop - b.keys.start for b in cut(Shape(1, 4, 1, n, n), Span(511, 0))) for n in (4096, 16384)]
    assert widths[1] <= 2 * widths[0] <= 2 * 2048


def scores(block: Block, shape: Shape) -> int:
    sizes = [part.stop - part.start for part in block]
    return shape.group * sizes[0] * sizes[1] * sizes[2] * sizes[3]
