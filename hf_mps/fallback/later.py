"""Notices operators that libraries register after the layer was switched on, as torchvision does when it is imported.

The dispatcher tells nobody in Python about a new operator, so the three ways in are watched: `torch.library`, through
`torch.ops.load_library`, and extension modules linked to torch.
"""

from __future__ import annotations

import functools
import mmap
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hf_mps.fallback import register
from hf_mps.fallback.operators import SERVES_METAL

# What every library that calls the dispatcher is linked to: libc10.so, libc10.dylib.
_NEEDS = b"libc10."


def watch() -> None:
    """Wrap the three ways in; a second call does nothing."""
    if hasattr(torch._ops._Ops.load_library, "hf_mps"):
        return
    _wrap_load_library()
    _wrap_library_impl()
    _wrap_extension_modules()


def _wrap_load_library() -> None:
    stock: Any = torch._ops._Ops.load_library

    @functools.wraps(stock)
    def load_library(self: Any, path: Any) -> None:
        stock(self, path)
        register.sweep()

    load_library.hf_mps = True  # type: ignore[attr-defined]
    torch._ops._Ops.load_library = load_library  # type: ignore[method-assign]


def _wrap_library_impl() -> None:
    stock: Any = torch.library.Library.impl

    @functools.wraps(stock)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any) -> None:
        key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
        name = op_name if isinstance(op_name, str) else op_name.name()
        name = name if "::" in name else f"{self.ns}::{name}"
        if key in SERVES_METAL:
            register.drop(name)  # the library brings its own, which ours would otherwise have to be overridden by
        stock(self, op_name, fn, dispatch_key, *args, **kwargs)
        if key == "CPU":
            register.consider(name)

    torch.library.Library.impl = impl  # type: ignore[method-assign]


def _wrap_extension_modules() -> None:
    stock = ExtensionFileLoader.exec_module

    @functools.wraps(stock)
    def exec_module(self: ExtensionFileLoader, module: ModuleType) -> None:
        stock(self, module)
        if _linked_to_torch(self.path):
            register.sweep()

    ExtensionFileLoader.exec_module = exec_module  # type: ignore[method-assign]


def _linked_to_torch(path: str) -> bool:
    """Whether the file names torch's core library; reads as far as the name, or the whole file from the page cache."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_NEEDS) >= 0
    except (OSError, ValueError):  # inside an archive, or empty
        return False
