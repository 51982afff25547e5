"""All ranks stop at one moment, whichever of them got the signal, and however far apart they are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune.run import interrupt
from hf_mps.finetune.run.interrupt import Agreement

MOMENTS = 400


def stopped(
    size: int, asks: dict[int, int], ahead: int, pause: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The moment at which each of `size` ranks, in threads, stops, and the signal; None for one that never does.

    `asks` says at which moment which rank gets a signal, numbered 10 + its rank. A rank ends a moment when all have
    begun the one `ahead` before it: a collective, and the work that may be queued for a device; it waits for the device
    where `interrupt.finish` is called.
    """
    store, begun = HashStore(), [0] * size
    monkeypatch.setattr(Agreement, "_number", repeat(0))
    monkeypatch.setattr(interrupt, "finish", lambda rank: reach(begun[rank]))

    def reach(moment: int) -> None:
        until = time.monotonic() + 20
        while min(begun) < moment:
            assert time.monotonic() < until, "the ranks wait for each other"
            time.sleep(0.001)

    def one(rank: int) -> Any:
        agreement = Agreement(Ranks(World(rank, size, rank, size), store), connect=lambda world: store)
        for moment in range(1, MOMENTS + 1):
            time.sleep(pause())
            if asks.get(rank) == moment:
                agreement.ask(10 + rank)
            begun[rank] = moment
            reach(moment - ahead)
            if (number := agreement.moment(rank)) is not None:
                begun[rank] = MOMENTS
                return moment, number
        agreement.close()
        return None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("ahead", [0, 1, 7])
@pytest.mark.parametrize("asks", [{0: 3}, {2: 5}, {0: 4, 1: 4, 2: 5}], ids=["main", "one other", "all"])
def test_all_stop_at_the_same_moment(asks: dict[int, int], ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(ahead)
    ends = stopped(3, asks, ahead, lambda: draw.random() * 0.02, monkeypatch)
    assert None not in ends
    assert len(set(ends)) == 1, ends
    moment, number = ends[0]
    assert moment > min(asks.values())
    assert number - 10 in asks
