"""Brings the sentinels of hf_mps.guards.sentinels to the modules of libraries that they look at."""

from __future__ import annotations

from types import ModuleType

from hf_mps.guards.sentinels import registry

REASON = "signs of a wrong training are looked for: hf_mps.guards.sentinels.report()"


def apply(module: ModuleType) -> None:
    """Install the sentinels for one module; does nothing where they were not switched on (no Metal)."""
    registry.install(module)
