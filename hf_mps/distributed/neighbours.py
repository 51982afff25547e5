"""Which ranks are alive: those of this host by their process, all by a count that each raises as long as it lives."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from typing import Any

import psutil

from hf_mps.core import settings
from hf_mps.core.errors import chain
from hf_mps.distributed.world import World

DEAD = "the process was killed or crashed; the system kills one where memory is short"
SILENT = "it does not answer: its host is off, asleep or cut off"
DEAF = "the host {}, at which the processes of this run meet, does not answer: it is off, asleep or cut off from here"
ORPHANED = "the launcher of the processes was killed"
# What Gloo, NCCL and the store say to the ranks that are left. Gloo's transport/tcp/pair.cc has the first three.
_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|Socket Timeout"
    r"|[Nn]o route to host|Connection refused|Network is unreachable|NCCL error|gloo[/:]"
)


def lost(error: BaseException) -> bool:
    """Whether an exception is what a rank sees of another that has gone."""
    distributed = sys.modules.get("torch.distributed")
    kinds = (ConnectionError, *((distributed.DistError,) if distributed is not None else ()))
    return any(
        isinstance(one, kinds) or (isinstance(one, RuntimeError) and _LOST.search(str(one)) is not None)
        for one in chain(error)
    )


class Neighbours:
    """The other ranks as the store knows them; each introduces itself, gives signs of life, and says when it leaves."""

    def __init__(self, world: World, store: Any) -> None:
        self._world = world
        self._store = store
        self._processes: dict[int, int] | None = None  # of this host, by rank
        self._parent = os.getppid()
        self._heard: dict[int, tuple[int, float]] = {}  # of other hosts, by rank: its count, and when that last rose
        self.silence = settings.silence()
        """Seconds without a sign of life after which a host counts as away: Python may be kept from giving one."""

    def orphaned(self) -> bool:
        """Whether torchrun's agent, which started this process and would end it, has gone."""
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent

    def introduce(self) -> None:
        """Write who this rank is."""
        here = [platform.node(), self._world.node, os.getpid(), self._parent]
        self._store.set(f"rank/{self._world.rank}", json.dumps(here))
        self.beat()

    def beat(self) -> None:
        """Give a sign of life."""
        self._store.add(f"beat/{self._world.rank}", 1)

    def leave(self) -> None:
        """Say that this rank is not to be looked for any more."""
        self._store.set(f"left/{self._world.rank}", "1")

    def dead(self) -> tuple[int, str] | None:
        """The first rank of this host whose process is gone, though it never said that it leaves, and its host.

        Of this host are those that the same launcher started: elsewhere a number may be another process's.
        """
        for rank, process in self._here().items():
            if not psutil.pid_exists(process) and not self._has_left(rank):
                return rank, platform.node()
        return None

    def away(self, now: float) -> tuple[int, str] | None:
        """The first rank of another host that gave no sign of life for `silence` seconds, and its host.

        A host that sleeps or is unplugged closes no connection: whoever waits for it in a collective hears nothing. To
        be called every now and then, `now` being time.monotonic(), by the main process alone, beside the store.
        """
        for rank in range(self._world.size):
            if rank // self._world.local_size == self._world.node:
                continue
            count = self._store.add(f"beat/{rank}", 0)
            known, since = self._heard.get(rank, (0, now))
            if count != known:
                self._heard[rank] = count, now
            elif count and now - since > self.silence and not self._has_left(rank):
                return rank, self._host(rank)
        return None

    def silent(self, seconds: float) -> tuple[int, str] | None:
        """The first rank that gives no sign of life for so long, and its host."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        try:
            before = [self._store.add(f"beat/{rank}", 0) for rank in others]
            time.sleep(seconds)
            after = [self._store.add(f"beat/{rank}", 0) for rank in others]
            for rank, then, now in zip(others, before, after, strict=True):
                if then == now and not self._has_left(rank):
                    return rank, self._host(rank)
        except Exception:  # the store is gone too
            return None
        return None

    def _here(self) -> dict[int, int]:
        """The processes of the other ranks of this host, by rank; none before all are there."""
        if self._processes is None:
            size = self._world.size
            if not self._store.check([f"rank/{rank}" for rank in range(size)]):
                return {}
            self._processes = {}
            for rank in range(size):
                _, node, process, parent = self._introduced(rank)
                if rank != self._world.rank and (node, parent) == (self._world.node, self._parent):
                    self._processes[rank] = process
        return self._processes

    def _introduced(self, rank: int) -> list[Any]:
        value: list[Any] = json.loads(self._store.get(f"rank/{rank}"))
        return value

    def _host(self, rank: int) -> str:
        return str(self._introduced(rank)[0]) if self._store.check([f"rank/{rank}"]) else "an unknown host"

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"]))
