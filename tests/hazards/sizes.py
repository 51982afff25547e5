"""Faults that begin at gigabytes, or on systems that no profile has: they begin early here, for both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from hf_mps.layer.guards.catalogue import registry
from hf_mps.metal.simulator import strictness
from tests.hazards import device

ELEMENTS = 4096
"""From where on those faults show that begin at 2^31 or 2^32 elements."""


@contextmanager
def huge_products() -> Iterator[None]:
    """pytorch#197636, and a Mac that can hold so much."""
    import torch

    from hf_mps.layer import guards
    from hf_mps.layer.guards.numerics import products as module

    guard = guards.get("huge-products")
    with _beginning_early("huge-products", module, "LIMIT"):
        guard.install(torch)
        try:
            yield
        finally:
            guard.release()


@contextmanager
def huge_cat() -> Iterator[None]:
    """pytorch#189960: torch 2.13."""
    from hf_mps.layer.guards.numerics import operators as module

    with _of("huge-cat", "2.13.0"), _beginning_early("huge-cat", module, "CAT_LIMIT"):
        yield


@contextmanager
def embedding_grad() -> Iterator[None]:
    """What Embedding.mm refuses from torch 2.13 on."""
    from hf_mps.layer.guards.numerics import indices as module

    with _beginning_early("embedding-grad", module, "GRAD_LIMIT"):
        yield


def conv3d_layout() -> AbstractContextManager[None]:
    """pytorch#197114: torch 2.14 on macOS 26.2."""
    return _of("conv3d-layout", "2.14.0", "26.2")


@contextmanager
def _of(name: str, torch_version: str, macos: str | None = None) -> Iterator[None]:
    """The fault `name`, and its guard as it is with that release and system."""
    import torch

    guard: Any = registry().get(name)
    there = set(guard.kernels)
    try:
        with device.mac(macos=macos, torch=torch_version), strictness.on(name):
            guard.install(torch)
            yield
    finally:
        guard.release(*(set(guard.kernels) - there or {"none"}))


@contextmanager
def _beginning_early(name: str, module: ModuleType, limit: str) -> Iterator[None]:
    before = getattr(module, limit)
    setattr(module, limit, ELEMENTS)
    try:
        with strictness.on(name), strictness.beginning_at(name, ELEMENTS):
            yield
    finally:
        setattr(module, limit, before)
