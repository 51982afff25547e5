"""Failures of the machine in one line each, which end a valid run: a full disk, no memory, …"""

from __future__ import annotations

import errno
import gc
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, chain
from hf_mps.core.text import first_line, summary
from hf_mps.distributed.voice import lost
from hf_mps.metal.device import memory

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.resolve import ResolvedRecipe


RESULTS = "results.json"
PENDING = ".results.json"
"""What results.json will say, and the report is made from: there from the end of the training until all is written."""
FULL = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file grew over the limit for one file",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "permission is denied",
}
# What to do before the run can resume; all other errors in FULL need free space.
CURES = {
    errno.EFBIG: "ulimit -f unlimited",
    errno.EROFS: "make the disk writable",
    errno.EACCES: "make the folder writable",
}
# torch.save's C++ writer and safetensors' Rust wrap the system's error; these are the words that are left of it.
TORN = "a file could not be written whole, as on a full disk"
WRITER = ("PytorchStreamWriter failed", "unexpected pos ")
MEMORY = (*memory.REFUSALS, "out of memory", "not enough memory: you tried to allocate")
# Trainer, after an evaluation: SQuAD 2.0 has no NoAns_f1 where every question has an answer.
NO_NUMBER = re.compile(r"metric_for_best_model` training argument is set to '(?:eval_)?([^']+)'")
NO_KERNEL = re.compile(r"The operator '([\w:.]+)' is not currently implemented for the MPS device")


def describe(error: BaseException) -> str | None:
    """Return a clause for a failure of the machine, or None for any other error."""
    if (gone := lost(error)) is not None:
        return gone
    for cause in chain(error):
        text = str(cause)
        if (number := _disk(cause)) is not None:
            name = getattr(cause, "filename", None)
            return FULL.get(number, TORN) + (f": {name}" if name else "")
        if _memory(cause):
            return f"out of memory: {first_line(cause) or 'the system has none left'}"
        if isinstance(cause, NotImplementedError) and (operator := NO_KERNEL.search(text)):
            way_on = "PYTORCH_ENABLE_MPS_FALLBACK=1 and the same command"
            return f"the operator {operator.group(1)} has no Metal kernel; next: {way_on}"
        if isinstance(cause, KeyError) and (metric := NO_NUMBER.search(text)):
            return f"no row of the evaluation gives {metric.group(1)}, which training.metric_for_best_model names"
    return None


def way_on(error: BaseException, resolved: ResolvedRecipe, smaller: Callable[[bool], list[str]]) -> str:
    """Return a clause with the command to type next after a failure of the disk or of memory, else an empty string.

    `smaller` gives the words for smaller batches (`arguments.smaller`), of an evaluation or of a step.
    An evaluation by smaller batches goes on with the run; smaller ones in a step are another recipe, which begins anew.
    """
    for cause in chain(error):
        if (number := _disk(cause)) is not None:
            return f"; next: {CURES.get(number, 'make room')}, then {resolved.command('finetune')}"
        if _memory(cause):
            evaluates = any(frame.f_code.co_name == "evaluation_loop" for frame, _ in walk_tb(error.__traceback__))
            words = smaller(evaluates)
            try:
                resolved.with_overrides(resolved.parse(words))
            except UserError:  # kto refuses a batch of one row
                words = []
            if not words:
                return f"; next: close other programs, then {resolved.command('finetune')}"
            return f"; next: {resolved.command('finetune', *([] if evaluates else ['--fresh']), *words)}"
    return ""


def _disk(cause: BaseException) -> int | None:
    """Return the system's number for a disk that cannot be written, 0 where the writer does not tell it, else None."""
    wrapped = re.search(r"\(os error (\d+)\)", str(cause))
    number = cause.errno if isinstance(cause, OSError) else int(wrapped.group(1)) if wrapped else None
    if number in FULL:
        return number
    return 0 if isinstance(cause, RuntimeError) and any(words in str(cause) for words in WRITER) else None


def _memory(cause: BaseException) -> bool:
    told = isinstance(cause, RuntimeError) and any(words in str(cause) for words in MEMORY)
    # torch's own is told by its name, as this file imports no torch.
    return told or isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError"


@contextmanager
def optional(part: str, kept: str = f"the model and {RESULTS} are there") -> Iterator[None]:
    """Print a failure inside as one line on stderr and go on: `part` only shows results, and `kept` says what stays."""
    try:
        yield
    except Exception as error:
        print(f"hf-mps: {part} is left out: {describe(error) or summary(error)}; {kept}", file=sys.stderr)


def place_of_cache(error: BaseException) -> str:
    """Return a clause for a disk that fills up before a run has a folder: where rows are cached, and how to move that.

    Arrow and `datasets` raise the system's error without the file's name.
    """
    import datasets

    if all(_disk(cause) is None for cause in chain(error)):
        return ""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    named = any(getattr(cause, "filename", None) for cause in chain(error))
    return f"{'' if named else f': {cache}'}; next: room there, or HF_HOME=FOLDER on another disk"


@contextmanager
def workers_ended() -> Iterator[None]:
    """End every data loader's workers when the block ends, however it does.

    Python's own exit sends SIGTERM and then waits for them without a limit; workers that outlive a signal to the whole
    group (interrupt.outlive) pay no heed to it.
    """
    try:
        yield
    finally:
        for iterator in _iterators():
            iterator._shutdown_workers()  # asks each, waits up to 5 s, and takes it off torch's list of the watched
            for worker in iterator._workers:
                if worker.is_alive():
                    worker.kill()


def killed_worker(error: BaseException) -> str | None:
    """Return a clause for an error that came of a worker which a signal has ended, else None.

    What the main process meets is a RuntimeError of torch's, or a broken connection where it was reading a tensor.
    """
    if not isinstance(error, (RuntimeError, OSError, EOFError)):
        return None
    codes = [worker.exitcode for iterator in _iterators() for worker in iterator._workers]
    # A process that a signal ended has its number, negative, as exit code.
    signals = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
    if not signals:
        return None
    told = f"a worker of the data loader was ended by {signals[0]}, as by a system short of memory"
    return f"{told}; next: the same command, or fewer training.dataloader_num_workers"


def _iterators() -> list[Any]:
    """Iterators over loaders with workers: those of a loop that failed are held by its frames alone."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    return [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]
