"""Every reader of a run has one owner, however many processes take it up again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mps.distributed.world import World
from hf_mps.finetune.stream.dataset import ReaderState
from hf_mps.finetune.stream.loader import deal


def everybody(readers: list[ReaderState], size: int, workers: int) -> list[ReaderState]:
    return [one for rank in range(size) for one in deal(readers, World(rank, size), workers)]


def test_a_new_run_has_a_reader_for_each_worker_of_each_rank() -> None:
    found = everybody([], 3, 2)
    assert [(one.number, one.readers) for one in found] == [(number, 6) for number in range(6)]


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 2), (5, 1), (7, 2)])
def test_each_batch_that_is_left_has_one_reader(size: int, workers: int) -> None:
    begun = [replace(reader, count=10 + place) for place, reader in enumerate(everybody([], 2, 2))]
    once = everybody(begun, size, workers)
    # And once more: those readers in a checkpoint behind some batches, taken up by three.
    for readers in (once, everybody([replace(one, count=one.count + 5) for one in once], 3, 1)):
        assert len({one.name for one in readers}) == len(readers)
        for number in range(4):
            owners = [one for one in readers if one.number == number]
            for count in range(40, 80):
                assert sum(one.mine(count) for one in owners) == 1
