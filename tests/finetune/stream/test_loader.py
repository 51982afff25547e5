"""Every reader of a run has one owner, however many processes take it up again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_mps.core import notices
from hf_mps.distributed.world import World
from hf_mps.finetune.stream.batches import Arranging
from hf_mps.finetune.stream.loader import Message, ReaderState, StreamLoader, deal


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


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2), (3, 2)])
def test_the_count_of_rows_goes_on_with_another_number_of_processes(tmp_path: Path, before: int, now: int) -> None:
    def loader(rank: int, size: int) -> StreamLoader:
        trainer: Any = SimpleNamespace(args=SimpleNamespace(dataloader_num_workers=0))
        made = StreamLoader(trainer, SimpleNamespace(), Arranging(1))  # type: ignore[arg-type]
        made._world = World(rank, size)
        return made

    for rank in range(before):
        one = loader(rank, before)
        one.begin(None)
        one.rows, one.tokens = 5, 50
        one.save(str(tmp_path))
    again = [loader(rank, now) for rank in range(now)]
    for one in again:
        with notices.redirected(lambda line: None):
            one.begin(tmp_path)
    notices.forget()  # so that another test of this process hears of the readers too
    assert sum(one.rows for one in again) == pytest.approx(5 * before)
    assert sum(one.tokens for one in again) == pytest.approx(50 * before)
    assert len({one.rows for one in again}) == 1


def test_rows_of_a_reader_that_workers_share_are_counted_once() -> None:
    trainer: Any = SimpleNamespace(args=SimpleNamespace(dataloader_num_workers=2))
    made = StreamLoader(trainer, SimpleNamespace(), Arranging(1))  # type: ignore[arg-type]
    made._readers = {name: ReaderState(name, 0, 1) for name in ("0/0", "0/1")}
    for name, read in (("0/0", 10), ("0/1", 12), ("0/0", 11)):
        made._taken(Message(reader=name, tally=(read, 1)))
    assert (made.read, made.broken) == (12, 1)
