"""What a collective on mps returns: its Work, with the future that DDP waits for.

Nothing here uses the device from Gloo's threads: a process in which two threads use Metal is killed
(pytorch#197805, open in 2.14). What is left to do on the device is done by the thread that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from hf_mps.core.text import first_line
from hf_mps.distributed.metal.collectives import HostSide, Started

UNCLAIMED = 600.0
"""Seconds after which a work that is through and that nobody has waited for is forgotten."""
_alive: dict[int, MetalWork] = {}
_mode = threading.local()


@contextmanager
def complete() -> Iterator[None]:
    """Have the collectives that this thread starts meanwhile end before they return.

    For callers who put something of their own behind a future: on a future that is through it runs in their thread.
    """
    before = getattr(_mode, "complete", False)
    _mode.complete = True
    try:
        yield
    finally:
        _mode.complete = before


def completing() -> bool:
    """Return whether this thread is in a block of `complete`."""
    return bool(getattr(_mode, "complete", False))


class MetalWork(Work):
    """Gloo's works of one collective; `values` are the device's tensors that it writes, in the future's form.

    C++ holds a work by its C++ half alone (Work.boxed), and would wait for ever on one whose Python half is gone: this
    keeps itself until somebody has waited, or its future was asked for and is through.
    """

    def __init__(self, what: str, started: Started, side: HostSide, values: list[Any]) -> None:
        super().__init__()
        self._what, self._works, self._side, self._values = what, started.works, side, values
        self._host_end = started.end
        self._lock = threading.Lock()
        self._over = False
        self._future: Any = None
        self._done_at: float | None = None
        _forget_unclaimed()
        _alive[id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for Gloo, then bring the results to the device's tensors. `timeout` of 0 is the process group's own.

        Raises torch.distributed.DistBackendError, in one line, where a rank went away or took too long.
        """
        own = timeout is None or timeout == timedelta(0)
        try:
            for work in self._works:
                work.wait() if own else work.wait(timeout)
        except RuntimeError as error:
            _alive.pop(id(self), None)
            raise failed(self._what, error) from None
        if not self._over:
            self._end()
            torch.mps.synchronize()
        _alive.pop(id(self), None)
        return True

    def get_future(self) -> Any:
        """The future of the device's tensors; it is through at once where they have to be copied to the device."""
        if self._future is None:
            if self._side.needs_device:
                self.wait()
                self._future = done(self._values)
            else:
                each = [work.get_future() for work in self._works]
                whole = each[0] if len(each) == 1 else torch.futures.collect_all(each)
                self._future = whole.then(self._arrived)
        return self._future

    def is_completed(self) -> bool:
        """Return whether Gloo is through."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether Gloo is through and no rank failed."""
        return all(work.is_completed() and work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Return what failed, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """Return the device's tensors."""
        return list(self._values)

    def source_rank(self) -> int:
        """Return the rank that a receive from any rank got its tensor from."""
        return int(self._works[0]._source_rank())

    _source_rank = source_rank

    def _arrived(self, future: Any) -> list[Any]:
        """In a thread of Gloo's: the CPU's part of the end, and the value of the future."""
        try:
            future.wait()
        except RuntimeError as error:
            _alive.pop(id(self), None)
            raise failed(self._what, error) from None
        self._end()
        _alive.pop(id(self), None)
        return self._values

    def _end(self) -> None:
        with self._lock:
            if not self._over:
                self._host_end()
                self._side.end()
                self._over = True


def completed(what: str, started: Started, side: HostSide, values: list[Any]) -> Any:
    """Wait for a collective here, and return a Work that is through. Raises as MetalWork.wait."""
    MetalWork(what, started, side, values).wait()
    # Only the stubs from torch 2.15 on name this function.
    return import_module("torch._C._distributed_c10d")._create_work_from_future(done(values))


def done(values: list[Any]) -> Any:
    """A future that is through."""
    future: Any = torch.futures.Future()
    future.set_result(values)
    return future


def failed(what: str, error: Exception) -> Exception:
    """Return the error of a collective in one line, without the place in Gloo's sources."""
    if isinstance(error, torch.distributed.DistBackendError):
        return error
    line = first_line(error).partition(" This is typically caused by")[0].removesuffix(".")
    if line.startswith("[") and "] " in line:
        line = line.partition("] ")[2]
    return torch.distributed.DistBackendError(f"{what}: {line}")


_looked = 0.0


def _forget_unclaimed() -> None:
    """Let works go that nobody waited for; a look a minute."""
    global _looked
    now = monotonic()
    if now - _looked > 60:
        _looked = now
        for key, work in list(_alive.items()):
            if work._done_at is None and work.is_completed():
                work._done_at = now
            if work._done_at is not None and now - work._done_at > UNCLAIMED:
                _alive.pop(key, None)
