"""A shim armed on a module that stands in for a library's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.core.patching import ModulePatcher


def arm(shim: ModuleType, library: Any, name: str = "") -> None:
    """Arm what `shim` declares for the module that `library` stands in for, by its name or as `name`."""
    library.__name__ = name or library.__name__
    ModulePatcher("shim", shim, safe=False).install(library)
