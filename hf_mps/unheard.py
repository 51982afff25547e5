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
