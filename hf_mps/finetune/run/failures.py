"""Failures of the machine in one line each, which end a valid run: a full disk, no memory, …"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_mps.core.errors import chain
from hf_mps.core.text import first_line, summary
from hf_mps.device import memory
from hf_mps.distributed.voice import lost

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
# torch.save's C++ writer and safetensors' Rust wrap the system's error; these are the words that are left of it.
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
        if isinstance(cause, OSError) and cause.errno in FULL:
            return FULL[cause.errno] + (f": {cause.filename}" if cause.filename else "")
        wrapped = re.search(r"\(os error (\d+)\)", text)
        if wrapped and int(wrapped.group(1)) in FULL:
            return FULL[int(wrapped.group(1))]
        if isinstance(cause, RuntimeError) and any(words in text for words in WRITER):
            return "a file could not be written whole, as on a full disk"
        if type(cause).__name__ == "OutOfMemoryError" or (
            isinstance(cause, RuntimeError) and any(w in text for w in MEMORY)
        ):
            return f"out of memory: {first_line(cause)}"
        if isinstance(cause, MemoryError):
            return "out of memory: the system has none left"
        if isinstance(cause, NotImplementedError) and (operator := NO_KERNEL.search(text)):
            way_on = "PYTORCH_ENABLE_MPS_FALLBACK=1 and the same command"
            return f"the operator {operator.group(1)} has no Metal kernel; next: {way_on}"
        if isinstance(cause, KeyError) and (number := NO_NUMBER.search(text)):
            return f"no row of the evaluation gives {number.group(1)}, which training.metric_for_best_model names"
    return None


@contextmanager
def optional(part: str) -> Iterator[None]:
    """Print a failure inside as one line on stderr and go on: `part` only shows results, which are stored by then."""
    try:
        yield
    except Exception as error:
        words = describe(error) or summary(error)
        print(f"hf-mps: {part} is left out: {words}; the model and {RESULTS} are there", file=sys.stderr)


def place_of_cache(error: BaseException) -> str:
    """Return a clause for a disk that fills up before a run has a folder: where rows are cached, and how to move that.

    Arrow and `datasets` raise the system's error without the file's name.
    """
    import datasets

    if not any(isinstance(cause, OSError) and cause.errno in FULL for cause in chain(error)):
        return ""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    named = any(getattr(cause, "filename", None) for cause in chain(error))
    return f"{'' if named else f': {cache}'}; next: room there, or HF_HOME=FOLDER on another disk"
