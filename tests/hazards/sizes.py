"""Faults that begin at gigabytes, or on systems that no profile has: they begin early here, for both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from hf_mps.simulator import strictness

ELEMENTS = 4096
"""From where on those faults show that begin at 2^31 or 2^32 elements."""


@contextmanager
def huge_products() -> Iterator[None]:
    """pytorch#197636, and a Mac that can hold so much."""
    import torch

    from hf_mps.guards.numerics import huge_products as module

    with _beginning_early("huge-products", module):
        module.GUARD.install(torch)
        try:
            yield
        finally:
            module.GUARD.release()


@contextmanager
def huge_cat() -> Iterator[None]:
    """pytorch#189960."""
    from hf_mps.guards.numerics import huge_cat as module

    with _beginning_early("huge-cat", module):
        yield


@contextmanager
def embedding_grad() -> Iterator[None]:
    """What Embedding.mm refuses from torch 2.13 on."""
    from hf_mps.guards.numerics import embedding_grad as module

    with _beginning_early("embedding-grad", module):
        yield


@contextmanager
def conv3d_layout() -> Iterator[None]:
    """pytorch#197114: torch 2.14 on macOS 26.2."""
    import torch

    from hf_mps.device import machine
    from hf_mps.guards.numerics import conv3d_layout as module

    guard: Any = module
    release, before = guard.torch_release, machine.present()
    guard.torch_release = lambda: (2, 14, 0)
    machine.override(replace(before, macos="26.2"))
    try:
        guard.GUARD.install(torch)
    finally:
        guard.torch_release = release
        machine.override(before)
    try:
        with strictness.on("conv3d-layout"):
            yield
    finally:
        guard.GUARD.release()


@contextmanager
def _beginning_early(name: str, module: ModuleType) -> Iterator[None]:
    before, module.LIMIT = module.LIMIT, ELEMENTS  # type: ignore[attr-defined]
    try:
        with strictness.on(name), strictness.beginning_at(name, ELEMENTS):
            yield
    finally:
        module.LIMIT = before  # type: ignore[attr-defined]
