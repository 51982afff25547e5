"""One computation on both devices, always with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def numbers(*shape: int) -> Tensor:
    """Normal numbers, which depend on the shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def agree(run: Callable[[str], Iterable[Tensor]], tolerance: float = 1e-3, *, laid_out: bool = True) -> bool:
    """Whether `run(device)` gives the CPU's results on the device, where other numbers lie in freed memory.

    An error of `tolerance` is allowed for each number and of as much for the largest. `laid_out` asks for its strides.
    """
    rights = [*run("cpu")]
    used = torch.full((2**20,), 50.0, device="mps")
    del used
    return all(
        (found.stride() == right.stride() or not laid_out)
        and torch.allclose(found.cpu(), right, rtol=tolerance, atol=tolerance * max(1.0, float(right.abs().max())))
        for right, found in zip(rights, run("mps"), strict=True)
    )
