"""The tools of an integration: a function put around a library's own, and one line of notice to the user."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hf_mps.core.stock import Around, described
from hf_mps.device.choice import metal

_said: set[str] = set()
_OWN = str(Path(__file__).resolve().parent.parent)
_BETWEEN = (f"{_OWN}{os.sep}integrations", f"{_OWN}{os.sep}compat", "<frozen importlib")
_LIBRARIES = (_OWN, str(Path(os.__file__).resolve().parent))
_INSTALLED = ("site-packages", "dist-packages")


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that calls `wrapper(stock, *arguments)`; each wrapper comes in once.

    Raises AttributeError where the library has no such function.
    """

    def replaced(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(stock, *args, **kwargs)

        return replacement

    _put(owner, name, wrapper, replaced)


def safely_around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """As `around`; where the wrapper fails, the caller gets what stock does (`hf_mps.core.stock`); a line is printed.

    Not for shims: what they refuse are the library's own errors, and a call in old words means nothing to stock.
    """

    def replaced(stock: Callable[..., Any]) -> Callable[..., Any]:
        place = f"{owner.__name__}.{name}"
        safe.append(Around(_Integration(place), place, stock, wrapper))
        return safe[-1].replacement()

    _put(owner, name, wrapper, replaced)


def _put(owner: Any, name: str, wrapper: Callable[..., Any], replaced: Callable[..., Any]) -> None:
    stock = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)
    wrappers = getattr(stock, "hf_mps", ())
    if wrapper not in wrappers:
        replacement = replaced(stock)
        replacement.hf_mps = (*wrappers, wrapper)
        setattr(owner, name, replacement)


class _Integration:
    """Whose fault it is where a function of an integration fails; that one is off then."""

    def __init__(self, place: str) -> None:
        self.on = True
        self._place = place

    def failed(self, error: Exception) -> None:
        self.on = False
        say(f"what is around {self._place} failed: {described(error)}; it is off from here on, and all else goes on")


safe: list[Around] = []
"""What `safely_around` has put into libraries."""


def say(line: str) -> None:
    """Print one line of notice to stderr, each distinct line once in a process."""
    if line not in _said:
        _said.add(line)
        print(f"hf-mps: {line}", file=sys.stderr, flush=True)


def asked_by_a_library() -> bool:
    """Tell whether an installed library asks for what a shim gives: it asks whether a thing is there, and is not told.

    Python's own library is one, and so are the recipes. Frames of the shims, of the import system and of a class's own
    attribute access stand between and do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(_BETWEEN) and function not in ("__getattribute__", "__getattr__"):
            return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)
        frame = frame.f_back
    return False


def say_if_metal_fails() -> None:
    """Tell once why a Metal device that PyTorch offers is not taken: the run would only seem slow otherwise."""
    import torch

    verdict = metal()
    if not verdict.value and torch.mps.device_count() > 0:
        say(f"Metal is not used: {verdict.reason}")
