"""accelerate's search for a batch size that fits (Trainer's auto_find_batch_size) goes on after Metal's error."""

from __future__ import annotations

import pytest
from accelerate.utils import find_executable_batch_size

from hf_mps import guards

METAL = "MPS backend out of memory (MPS allocated: 1 GB, other allocations: 0 bytes, max allowed: 1 GB). Tried to …"


def search() -> list[int]:
    """The batch sizes that are tried where 3 is the largest that fits."""
    tried = []

    @find_executable_batch_size(starting_batch_size=5)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 3:
            raise RuntimeError(METAL)

    train()
    return tried


def test_the_search_goes_on_after_metal_s_error() -> None:
    assert search() == [5, 4, 3]


def test_without_the_guard_it_does_where_accelerate_knows_the_text() -> None:
    verdict = guards.get("oom-text").verdict()
    with guards.suspended("oom-text"):
        if verdict.value and "accelerate" in verdict.reason:
            with pytest.raises(RuntimeError, match="MPS backend out of memory"):
                search()
        else:
            assert search() == [5, 4, 3]


def test_another_error_is_another_error() -> None:
    @find_executable_batch_size(starting_batch_size=5)
    def train(batch_size: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train()
