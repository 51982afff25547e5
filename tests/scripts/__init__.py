"""Tests of scripts/, which are no package: each script is imported as Python has it that runs it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests import CHECKOUT

TOOLS = CHECKOUT / "scripts" / "tools"


def script(name: str) -> ModuleType:
    """The script scripts/tools/NAME.py as a new module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        spec.loader.exec_module(module)
    return module
