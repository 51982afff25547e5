"""Attention by kernels of ours, of every size that their blocks divide badly, and dropout as it is drawn."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from hf_mps.metal.training_kernels import attention, trial

# batch, heads, heads of keys, queries, keys, width, width of values
SHAPES = [
    (1, 1, 1, 3, 5, 8, 7),
    (2, 3, 1, 31, 33, 17, 32),
    (1, 4, 2, 65, 40, 64, 64),
    (1, 2, 2, 40, 129, 96, 128),
    (2, 2, 1, 16, 16, 128, 80),
]


@pytest.mark.parametrize("hidden", ["nothing", "later", "some, and all for one query"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_exact_as_pytorchs_operators(shape: tuple[int, ...], hidden: str) -> None:
    batch, heads, shared, queries, keys, width, value_width = shape
    draw = torch.Generator().manual_seed(0)
    sizes = [(heads, queries, width), (shared, keys, width), (shared, keys, value_width), (heads, queries, value_width)]
    inputs = [torch.randn(batch, *size, generator=draw) for size in sizes]
    seen = torch.rand(batch, 1, queries, keys, generator=draw) > 0.3
    seen[0, 0, 0] = False
    call = attention.Call(width**-0.5, seen if "some" in hidden else None, hidden == "later", 0.25, (-5, 2**32 - 7))
    case = attention._case("", inputs, call)
    ours, stock = trial.errors(case)
    assert ours <= max(2 * stock, trial.EXACT * torch.finfo(torch.float32).eps)


def test_dropout_keeps_as_many_as_asked_and_each_number_by_itself() -> None:
    query = torch.empty(4, 8, 64, 1)
    draws = (1, 0), (2, 0), (1, 4 * 8 * 64 * 64)
    drawn = [attention.kept(query, query, attention.Call(1, None, False, 0.1, draw)) for draw in draws]
    first, second, third = (found for found in drawn if found is not None)
    beside = first[..., 1:] != first[..., :-1], first[:, 1:] != first[:, :-1]
    for found in (first, second, third, first != second, first != third, *beside):
        share = 0.9 if any(found is each for each in (first, second, third)) else 0.18
        assert stats.binomtest(int(found.sum()), found.numel(), share).pvalue > 1e-4


def test_philox_gives_the_numbers_of_its_authors() -> None:
    """The known answer of Random123 1.14 (tests/kat_vectors) for a counter and a key of zeros: 6627e8d5 first."""
    one = torch.empty(1, 1, 1, 1)
    for dropout, keeps in ((0x6627E8 / 2**24, True), (0x6627E9 / 2**24, False)):
        found = attention.kept(one, one, attention.Call(1, None, False, dropout, (0, 0)))
        assert found is not None
        assert bool(found) is keeps
