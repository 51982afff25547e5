"""Modules that transformers moved or removed, under the names that older scripts import them by.

`name_table.module_of_today` says where their names are now. Needless, module by module, where transformers has it: this
finder is the last that the import system asks, so whatever is installed comes first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Nothing of ours at the top: this finder is put in place at every `import torch`, and seldom asked.


def start() -> None:
    """Put the finder behind all others. Calling it again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("transformers."):
            return None
        from hf_mps.compat.name_table import MODULES, module_of_today

        today = module_of_today(fullname)
        if today is None or not _is_there(today):
            return None
        package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, _Loader(today), is_package=package)  # type: ignore[arg-type]  # a loader by its methods


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class _Loader:
    """Makes a module that finds its names in today's one when they are asked for."""

    def __init__(self, today: str) -> None:
        self._today = today

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from hf_mps.core.notices import asked_by_a_library, tell

        gone, today = module.__name__, self._today

        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {gone!r} has no attribute {name!r}")
            found = import_module(today)
            # *TokenizerFast and *FeatureExtractor are names of transformers itself, in no file of their own.
            return getattr(found, name) if hasattr(found, name) else getattr(import_module("transformers"), name)

        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        if not asked_by_a_library():
            instead = (
                "datasets.load_dataset takes its place" if today.startswith("hf_mps") else f"{today} takes its place"
            )
            tell(f"{gone}: {instead}")
