"""Warnings that are ignored for a while, without a word to Python about which of the others were shown already.

warnings.catch_warnings and the functions that add a filter declare every registry of shown warnings out of date, and
each warning that a program shows once comes again. A filter that is put into the list by hand does not.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def ignoring(category: type[Warning] = Warning, message: str = "") -> Iterator[None]:
    """Ignore warnings of `category` whose text begins as the pattern `message`, in every thread; others stay."""
    rule = ("ignore", re.compile(message, re.IGNORECASE) if message else None, category, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, rule)
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody reset the filters meanwhile
            filters.remove(rule)


@contextmanager
def overriding() -> Iterator[None]:
    """Let kernels take the places of others for a while, of which PyTorch warns once in a process.

    It warns each time meanwhile (OperatorEntry.cpp, TORCH_WARN_ONCE), so that the once is left for a kernel that
    somebody else replaces. Imports torch.
    """
    import torch

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with ignoring(UserWarning, "Warning only once for all operators"):
            yield
    finally:
        torch.set_warn_always(always)
