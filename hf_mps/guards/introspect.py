"""What a library's function names in its code: how a guard tells a fixed version from one with the fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any


def words(function: Callable[..., Any]) -> frozenset[str]:
    """Names and short strings in the function's own code, under whatever was put around it."""
    code: CodeType = inspect.unwrap(function).__code__
    return frozenset((*code.co_names, *(each for each in code.co_consts if isinstance(each, str) and len(each) < 40)))
