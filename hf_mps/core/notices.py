"""What the layer says, each line once in a process, at the first line of the user's own code; and what is not shown."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hf_mps.core.errors import Notice

_INSTALLED = ("site-packages", "dist-packages")
_OWN = str(Path(__file__).resolve().parent.parent)
_BETWEEN = tuple(f"{_OWN}{os.sep}{part}" for part in ("layer/compat", "layer/integrations", "core"))
"""Where our code is between a library's name and who asks for it."""

# Whose developers run them from a checkout or an editable install, outside the folders above.
_LIBRARIES = {
    *("accelerate", "datasets", "diffusers", "evaluate", "huggingface_hub", "lightning", "peft", "pytorch_lightning"),
    *("sentence_transformers", "setfit", "tokenizers", "torch", "transformers", "trl"),
}

_said: set[str] = set()
_listeners: list[Callable[[str], None]] = []


class GuardNotice(Notice):
    """A guard of hf_mps did something about a known hazard of Metal."""


class SentinelNotice(Notice):
    """A sentinel of hf_mps saw something that a right training does not show."""


class LayerWarning(UserWarning):
    """hf_mps could not switch itself on, or not all of itself: `import torch` goes on without it."""


def warn_user(line: str, category: type[Warning] = GuardNotice, *, again: bool = False) -> None:
    """Warn with `line` at the first line of the user's own code, each distinct line once in a process or `again`.

    A program that prints its own lines takes it instead (`redirected`).
    """
    if not (once(line) or again):
        return
    if _listeners:
        _listeners[-1](line)
        return
    warnings.warn_explicit(f"hf_mps: {line}", category, *(user_line() or ("<unknown>", 1)))


def print_notice(line: str) -> None:
    """Print one line of notice to stderr, each distinct line once in a process."""
    if once(line):
        on_stderr(line)


def on_stderr(line: str) -> None:
    """Print a line as a command's notice; for `redirected`, where a command runs and no line of a script is the
    cause."""
    print(f"hf-mps: {line}", file=sys.stderr, flush=True)


def once(key: str) -> bool:
    """Return whether nothing was said under `key` in this process yet; from now on something was."""
    known = key in _said
    _said.add(key)
    return not known


@contextmanager
def redirected(listener: Callable[[str], None]) -> Iterator[None]:
    """Give every line to `listener` for a while, in place of a warning."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def forget() -> None:
    """Let everything be said once more."""
    _said.clear()


def warn(line: str) -> None:
    """Tell in one warning what could not be switched on; never raises."""
    try:
        warnings.warn(line, LayerWarning, stacklevel=2)
    except LayerWarning:  # the program turns warnings into errors, which would end its `import torch`
        print(f"hf-mps: {line}", file=sys.stderr)


def user_line() -> tuple[str, int] | None:
    """File and line of the innermost frame of the user's own code: not this package's, not an installed library's.

    In a backward pass it is the line that waits for it. Where only libraries are on the stack, the innermost frame
    outside torch and this package.
    """
    frames = _stack(sys._getframe(1))
    if not any(map(_is_users, frames)):
        # In a backward pass, which autograd runs in its own thread, the user's line is in the thread that waits for it.
        running = sys._current_frames()
        for ident in (threading.main_thread().ident, *running):
            if ident in running and ident != threading.get_ident():
                frames += _stack(running[ident])
    found = next(itertools.chain(filter(_is_users, frames), filter(_is_neither, frames)), None)
    return None if found is None else (found.f_code.co_filename, found.f_lineno)


def _stack(frame: FrameType) -> list[FrameType]:
    return [each for each, _ in traceback.walk_stack(frame)]


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    # <stdin> and notebook cells are the user's, <frozen importlib> is not; <string> is `python -c` in module __main__.
    if path.startswith("<"):
        return not path.startswith("<frozen") and frame.f_globals.get("__name__") == "__main__"
    return not path.startswith(_library_folders()) and not any(name in path for name in _INSTALLED)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """This package's folder and those of Python's and the environment's libraries, each with a separator behind it."""
    import sysconfig  # here, as every `import torch` loads this file and hardly one asks for a line

    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(folder + os.sep for folder in (_OWN, *folders))


def _is_neither(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in ("hf_mps", "torch", "threading", "warnings")


def asked_by_a_library() -> bool:
    """Tell whether an installed library asks for what a shim gives: it asks whether a thing is there, and is not told.

    Python's own library is one, and so are the recipes. Frames of the shims, of the import system and of a class's own
    attribute access stand between and do not count.
    """
    libraries = (_OWN, str(Path(os.__file__).resolve().parent))
    for frame in _stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        between = file.startswith((*_BETWEEN, "<frozen importlib"))
        if not between and frame.f_code.co_name not in ("__getattribute__", "__getattr__"):
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            return package in _LIBRARIES or file.startswith(libraries) or any(folder in file for folder in _INSTALLED)
    return False


@contextmanager
def ignoring(category: type[Warning] = Warning, message: str = "") -> Iterator[None]:
    """Ignore warnings of `category` whose text begins as the pattern `message`, in every thread; others stay.

    warnings.catch_warnings and the functions that add a filter declare every registry of shown warnings out of date,
    and each warning that a program shows once comes again. A filter that is put into the list by hand does not.
    """
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
