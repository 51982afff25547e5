"""What a library's function names in its code, by which a guard tells a version without its fault from one with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from hf_mps.core.releases import torch_release as torch_release


def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Names and short strings in the function's own code, under whatever was put around it."""
    code: CodeType = inspect.unwrap(function).__code__
    return frozenset((*code.co_names, *(text for text in code.co_consts if isinstance(text, str) and len(text) < 40)))
