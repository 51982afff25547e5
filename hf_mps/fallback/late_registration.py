"""Notices operators that libraries register after the layer was switched on, as torchvision does when it is imported.

The dispatcher tells nobody in Python about a new operator, so the three ways in are watched: `torch.library`, through
`torch.ops.load_library`, and extension modules linked to torch.
"""

from __future__ import annotations

import functools
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

import torch

from hf_mps.fallback import registration
from hf_mps.fallback.linked import linked_to_torch
from hf_mps.operators.dispatcher import SERVES_METAL


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
        registration.sweep()

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
            registration.drop(name)  # the library brings its own, which ours would otherwise have to be overridden by
        stock(self, op_name, fn, dispatch_key, *args, **kwargs)
        if key == "CPU":
            registration.consider(name)

    torch.library.Library.impl = impl  # type: ignore[method-assign]


def _wrap_extension_modules() -> None:
    stock = ExtensionFileLoader.exec_module

    @functools.wraps(stock)
    def exec_module(self: ExtensionFileLoader, module: ModuleType) -> None:
        stock(self, module)
        if linked_to_torch(self.path):
            registration.sweep()

    ExtensionFileLoader.exec_module = exec_module  # type: ignore[method-assign]
