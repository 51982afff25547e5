"""What each aten operator launches on Metal: a file a family.

A comment "Host: operations/Sort.mm" names PyTorch's file, below aten/src/ATen/native/mps, whose decisions the rules
below it follow.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module


def load() -> None:
    """Import every file of this folder: those of the families declare their rules."""
    for found in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{found.name}")
