"""Brings the guards of hf_mps.guards to the modules of libraries that they patch."""

from __future__ import annotations

from types import ModuleType

from hf_mps.guards import registry

REASON = "known hazards of Metal are guarded: hf_mps.guards.report()"


def apply(module: ModuleType) -> None:
    """Install the guards for one module; does nothing where they were not switched on (no Metal)."""
    registry.install(module)
