"""Libraries as they were before a fault was mended, for those that are newer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hf_mps.guards.catalogue import REGISTRY


@contextmanager
def _older(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `module` have another function, and so all that imported it by name, as if it had been imported like that."""
    stock = getattr(module, name)
    holders = [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is stock]

    def put(found: Callable[..., Any]) -> None:
        setattr(module, name, found)
        REGISTRY.install("guard", module)  # as after an import
        for holder in holders:
            setattr(holder, name, getattr(module, name))

    put(function)
    try:
        yield
    finally:
        put(stock)


def oom_text() -> Any:
    """accelerate#4226: up to 1.14 only the words of other devices mean that a batch was too large."""
    import accelerate.utils.memory as module

    stock = module.should_reduce_batch_size

    def should_reduce_batch_size(exception: Exception) -> bool:
        return not str(exception).startswith("MPS backend") and bool(stock(exception))

    return _older(module, "should_reduce_batch_size", should_reduce_batch_size)


def resume_epoch() -> Any:
    """accelerate 1.10 (data_loader.py): the loader that skips batches counts its epochs from 0."""
    import accelerate.data_loader as module

    stock = module.skip_first_batches

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return _first_epoch(stock(dataloader, num_batches))

    return _older(module, "skip_first_batches", skip_first_batches)


def _first_epoch(loader: Any) -> Any:
    loader.iteration = 0
    return loader
