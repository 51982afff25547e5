"""Keeps the libraries' own bars, reports and standing advice off the screen; real warnings stay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hf_mps.core import import_hooks
from hf_mps.core.notices import ignoring

# Said at every run, about what the runner does on purpose; each is matched at its beginning.
KNOWN_ADVICE = (
    "The tokenizer has new PAD/BOS/EOS tokens",
    "mtime may not be reliable on this filesystem",  # checkpoints are told apart by their numbers instead
)
# What a library says of another's use of a name: peft and TRL still ask models for `is_gradient_checkpointing`,
# accelerate 1.15 gives DistributedDataParallel `broadcast_buffers`, sentence-transformers 6 gathers by a function that
# PyTorch 2.13 calls old.
DEPRECATED = r"`.*gradient_checkpointing\w*`.* deprecated|`broadcast_buffers` is deprecated|.*all_gather is deprecated"


@contextmanager
def no_bars() -> Iterator[None]:
    """Silence the progress bars of transformers, datasets and huggingface_hub, and known advice; restore them after."""
    with import_hooks.uncollected():
        import datasets
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
        from transformers.utils import logging as theirs

    on = {
        theirs.enable_progress_bar: theirs.is_progress_bar_enabled(),
        datasets.enable_progress_bars: not datasets.are_progress_bars_disabled(),
        enable_progress_bars: not are_progress_bars_disabled(),
    }
    # At the handlers: a filter of the logger itself is not asked about records of the loggers below it.
    handlers = theirs._get_library_root_logger().handlers
    theirs.disable_progress_bar()  # huggingface_hub's too
    datasets.disable_progress_bars()
    for handler in handlers:
        handler.addFilter(_no_advice)
    try:
        with ignoring(FutureWarning, DEPRECATED):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_no_advice)
        for enable, was_on in on.items():
            if was_on:
                enable()


def _no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(KNOWN_ADVICE)


def errors_only() -> AbstractContextManager[None]:
    """Let transformers log only errors: for loading, whose report of new weights the header replaces."""
    from transformers.utils import logging as theirs

    return _verbosity(theirs, logging.ERROR)


def datasets_silent() -> AbstractContextManager[None]:
    """Keep `datasets` from logging an error that is about to be printed in one line."""
    import datasets

    return _verbosity(datasets.logging, logging.CRITICAL)


@contextmanager
def _verbosity(theirs: Any, level: int) -> Iterator[None]:
    before = theirs.get_verbosity()
    theirs.set_verbosity(level)
    try:
        yield
    finally:
        theirs.set_verbosity(before)
