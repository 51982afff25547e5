"""All ranks stop at one moment, whichever of them got the signal, and however far apart they are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from hf_mps.distributed.agreement import Agreement
from hf_mps.distributed.watch import Watch
from hf_mps.distributed.world import World

MOMENTS = 400


def stopped(size: int, asks: dict[int, int], pause: Callable[[int], float], ahead: int) -> list[Any]:
    """The moment at which each of `size` ranks, in threads, stops, and the signal; None for one that never does.

    `asks` says at which moment which rank gets a signal, numbered 10 + its rank. A rank ends a moment
    when all have begun the one `ahead` before it: a collective, and the work that may be queued for a device.
    """
    store, begun = HashStore(), [0] * size

    def one(rank: int) -> Any:
        with Watch(World(rank, size, rank, size), store, leave=lambda code: None) as watch:
            agreement = Agreement(watch)
            for moment in range(1, MOMENTS + 1):
                time.sleep(pause(rank))
                if asks.get(rank) == moment:
                    agreement.ask(10 + rank)
                begun[rank] = moment
                until = time.monotonic() + 20
                while min(begun) < moment - ahead:
                    assert time.monotonic() < until, "the ranks wait for each other"
                    time.sleep(0.001)
                if (number := agreement.moment()) is not None:
                    begun[rank] = MOMENTS
                    return moment, number
            agreement.close()
            return None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("ahead", [0, 1, 7])
@pytest.mark.parametrize("asks", [{0: 3}, {2: 5}, {0: 4, 1: 4, 2: 5}], ids=["main", "one other", "all"])
def test_all_stop_at_the_same_moment(asks: dict[int, int], ahead: int) -> None:
    draw = random.Random(ahead)
    ends = stopped(3, asks, lambda rank: draw.random() * 0.02, ahead)
    assert None not in ends
    assert len(set(ends)) == 1, ends
    moment, number = ends[0]
    assert moment > min(asks.values())
    assert number - 10 in asks
