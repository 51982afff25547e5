"""Libraries as they were before a fault was mended, for those that are newer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hf_mps.layer.guards.catalogue import registry


@contextmanager
def _older(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `module` have another function, and so all that imported it by name, as if it had been imported like that."""
    stock = getattr(module, name)
    holders = [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is stock]

    def put(found: Callable[..., Any]) -> None:
        setattr(module, name, found)
        registry().install("guard", module)  # as after an import
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


@contextmanager
def half_precision() -> Iterator[None]:
    """accelerate 1.10 (accelerator.py): fp16 is for other devices, and mps is not named among them."""
    from accelerate import Accelerator

    guard: Any = registry().get("half-precision")
    stock, known = Accelerator.__init__, guard._in_accelerate

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if self.device.type == "mps" and self.mixed_precision == "fp16":
            raise ValueError("fp16 mixed precision requires a GPU (not 'mps').")

    Accelerator.__init__ = init
    guard._in_accelerate = {"fp16": lambda: False, "bf16": lambda: True}
    try:
        yield
    finally:
        Accelerator.__init__, guard._in_accelerate = stock, known


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
