"""torch.backends.mps.is_available answers with the probe's verdict: the one question that every library asks.

PyTorch says True wherever macOS lists a Metal device, also in virtual machines where each allocation fails
(actions/runner-images#9918), and it has no switch. transformers, Accelerate, Lightning and plain scripts all take Metal
on this word alone; newer code asks torch.accelerator, which does not ask this function and so has to be told as well.
It can go when PyTorch tries the device before it says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_mps.core.patching import ModulePatcher

REASON = (
    "answers with HF_MPS_DEVICE and, in virtual machines, with a real probe, and torch.accelerator with it; PyTorch's "
    "own is True where all fails"
)

replacements: list[Callable[..., Any]] = []
"""The replacements of PyTorch's functions."""


def _metal(stock: Callable[[], bool]) -> bool:
    from hf_mps.metal.device.choice import metal

    return metal().value


def _current(stock: Callable[..., Any], check_available: bool = False) -> Any:
    """Return the accelerator, or None where that is a Metal that is switched off or has failed.

    Without `check_available` PyTorch promises that nothing touches the device, so the probe is not run for it.
    """
    found = stock()
    if found is None or found.type != "mps":
        return stock(check_available)
    from hf_mps.metal.device.choice import metal, refused

    return found if (metal().value if check_available else not refused()) else None


def _count(stock: Callable[[], int]) -> int:
    import torch

    there = torch.accelerator.current_accelerator()
    return 0 if there is not None and there.type == "mps" and not torch.backends.mps.is_available() else stock()


ANSWERS: dict[str, Callable[..., Any]] = {
    "torch.backends.mps:is_available": _metal,
    # Where torch.accelerator asks whether its device is there, and how many of it.
    "torch.mps:is_available": _metal,
    "torch.accelerator:current_accelerator": _current,
    "torch.accelerator:device_count": _count,
}
"""PyTorch's functions, and what answers in the place of each, as `answer(stock, *arguments)`."""


def install() -> None:
    """Put the verdict in place of PyTorch's answers; once. Imports torch, asks nothing of the device yet."""
    import torch  # noqa: F401

    # Without core.patching, whose import would be the dearest part of every `import torch` without Metal.
    for target, answer in ANSWERS.items():
        module, _, name = target.partition(":")
        _answer(sys.modules.get(module), name, answer)


def _answer(module: ModuleType | None, name: str, answer: Callable[..., Any]) -> None:
    """Replace `module.name` by a function that returns `answer(stock, *arguments)`, where torch has it; once."""
    stock = getattr(module, name, None)
    if stock is None or hasattr(stock, "hf_mps_patches"):
        return

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return answer(stock, *args, **kwargs)

    # `wraps` copies what is in __dict__, where lru_cache's methods are not; callers of the stock function may use them.
    for cache in ("cache_clear", "cache_info"):
        if hasattr(stock, cache):
            setattr(replacement, cache, getattr(stock, cache))
    replacement.hf_mps_patches = ("availability",)  # type: ignore[attr-defined]
    # As torch.compiler.assume_constant_result says it, without importing the compiler, which cannot trace how the
    # answer is found: it asks once and keeps it. What it knows by name has no such mark (integrations/compiler.py).
    replacement._dynamo_marked_constant = True  # type: ignore[attr-defined]
    setattr(module, name, replacement)
    replacements.append(replacement)


def patcher() -> ModulePatcher:
    """Return what `install` does, declared as whoever else patches a library declares it."""
    from hf_mps.core.patching import ModulePatcher, Put

    patches = {target: Put(answer, optional=True) for target, answer in ANSWERS.items()}
    return ModulePatcher("device", sys.modules[__name__], safe=False, patches=patches)
