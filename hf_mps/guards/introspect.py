"""What is installed: the release of torch, and what a library's function names in its code.

By the second a guard tells a version without the fault from one with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any


def torch_release() -> tuple[int, ...]:
    """The release as numbers, (2, 13, 0), whatever follows them in the version's text."""
    import torch

    return _numbers(str(torch.__version__))


@functools.cache
def _numbers(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release


def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Names and short strings in the function's own code, under whatever was put around it."""
    code: CodeType = inspect.unwrap(function).__code__
    return frozenset((*code.co_names, *(text for text in code.co_consts if isinstance(text, str) and len(text) < 40)))
