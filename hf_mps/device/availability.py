"""torch.backends.mps.is_available answers with the probe's verdict: the one question that every library asks.

PyTorch says True wherever macOS lists a Metal device, also in virtual machines where each allocation fails
(actions/runner-images#9918), and it has no switch. transformers, Accelerate, Lightning and plain scripts all take Metal
on this word alone; newer code asks torch.accelerator, which does not ask this function and so has to be told as well.
It can go when PyTorch tries the device before it says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hf_mps.core.patching import ModulePatcher, Patch, Patcher, plainly, replace

REASON = (
    "answers with HF_MPS_DEVICE and, in virtual machines, with a real probe, and torch.accelerator with it; PyTorch's "
    "own is True where all fails"
)

replacements: list[Callable[..., Any]] = []
"""What stands in place of PyTorch's functions."""


def _metal(stock: Callable[[], bool]) -> bool:
    from hf_mps.device.choice import metal

    return metal().value


def _current(stock: Callable[..., Any], check_available: bool = False) -> Any:
    """The accelerator, or None where that is a Metal that is switched off or has failed.

    Without `check_available` PyTorch promises that nothing touches the device, so the probe is not run for it.
    """
    found = stock()
    if found is None or found.type != "mps":
        return stock(check_available)
    from hf_mps.device.choice import metal, refused

    return found if (metal().value if check_available else not refused()) else None


def _count(stock: Callable[[], int]) -> int:
    import torch

    there = torch.accelerator.current_accelerator()
    return 0 if there is not None and there.type == "mps" and not torch.backends.mps.is_available() else stock()


class Answer(Patch):
    """A function that returns `method(stock, *arguments)` and looks like the stock one, also to torch.compile."""

    way = "in place of"

    def put(self, owner: Patcher, place: Any, name: str, stock: Any) -> None:
        """Replace the function, once."""
        replace(owner.name, place, name, lambda stock: _answering(stock, self.ours(owner)))


def _answering(stock: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    replacement = plainly(stock, answer)
    # The cache methods, too, that callers of the stock function may use.
    for cache in ("cache_clear", "cache_info"):
        if hasattr(stock, cache):
            setattr(replacement, cache, getattr(stock, cache))
    # As torch.compiler.assume_constant_result says it, without importing the compiler, which cannot trace how the
    # answer is found: it asks once and keeps it. What it knows by name has no such mark (integrations/compiler.py).
    replacement._dynamo_marked_constant = True  # type: ignore[attr-defined]
    replacements.append(replacement)
    return replacement


patches = {
    "torch.backends.mps:is_available": Answer(_metal),
    # Where torch.accelerator asks whether its device is there, and how many of it.
    "torch.mps:is_available": Answer(_metal, optional=True),
    "torch.accelerator:current_accelerator": Answer(_current, optional=True),
    "torch.accelerator:device_count": Answer(_count, optional=True),
}
PATCHER = ModulePatcher("device", sys.modules[__name__], safe=False)


def install() -> None:
    """Put the verdict in place of PyTorch's answers; once. Imports torch, asks nothing of the device yet."""
    import torch

    PATCHER.install(torch)
