"""Brings the shims of hf_mps.compat, names that older scripts use, to the modules that lack them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from hf_mps.compat import SHIMS

REASON = "names and arguments of older scripts work, each with one line of notice"


def apply(module: ModuleType) -> None:
    """Apply the shims for one module; each is a no-op where the module still has its name."""
    for shim in SHIMS[module.__name__]:
        import_module(f"hf_mps.compat.{shim}").apply(module)
