"""The worker processes of a run's data loaders: they end with the run, and one that was killed is named."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ended() -> Iterator[None]:
    """End every data loader's workers when the block ends, however it does.

    Python's own exit sends SIGTERM and then waits for them without a limit; workers that outlive a signal to the whole
    group (interrupt.Outlives) pay no heed to it.
    """
    try:
        yield
    finally:
        for iterator in _iterators():
            iterator._shutdown_workers()  # asks each, waits up to 5 s, and takes it off torch's list of the watched
            for worker in iterator._workers:
                if worker.is_alive():
                    worker.kill()


def killed(error: BaseException) -> str | None:
    """Return a clause for an error that came of a worker which a signal has ended, else None.

    What the main process meets is a RuntimeError of torch's, or a broken connection where it was reading a tensor.
    """
    if not isinstance(error, (RuntimeError, OSError, EOFError)):
        return None
    codes = [worker.exitcode for iterator in _iterators() for worker in iterator._workers]
    signals = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
    if not signals:
        return None
    return (
        f"a worker of the data loader was ended by {signals[0]}, as by a system short of memory; next: the same"
        " command, or fewer training.dataloader_num_workers"
    )


def _iterators() -> list[Any]:
    """Iterators over loaders with workers: those of a loop that failed are held by its frames alone."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    return [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]
