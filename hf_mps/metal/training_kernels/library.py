"""What the kernels share: a source that is compiled once a process, and what they take."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
"""The dtypes that kernels have an instance for, with Metal's word."""
SIMDGROUP = 32
"""Threads that compute in step on every Apple GPU (the Metal feature set tables)."""


DRAWN = 24
"""Random bits that decide whether dropout keeps a number."""


class Source:
    """A file of Metal source in this folder, behind another that it needs, if any."""

    def __init__(self, file: str, needs: str = "") -> None:
        self.path = Path(__file__).with_name(file)
        self._needs = needs

    @functools.cached_property
    def text(self) -> str:
        """The source."""
        needed = self.path.with_name(self._needs).read_text(encoding="utf-8") if self._needs else ""
        return needed + self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def digest(self) -> str:
        """What the source, and the module that launches it, are known by."""
        both = self.text + self.path.with_suffix(".py").read_text(encoding="utf-8")
        return hashlib.sha256(both.encode()).hexdigest()[:16]

    @functools.cached_property
    def compiled(self) -> Any:
        """The library that PyTorch makes of it.

        Raises SyntaxError for a source that does not compile; on the simulated device UserError where no clang is
        installed.
        """
        return torch.mps.compile_shader(self.text)

    def kernel(self, name: str, dtype: torch.dtype) -> Any:
        """Return the instance of a function for a dtype, `name_float`."""
        return getattr(self.compiled, f"{name}_{TYPES[dtype]}")


def ordinary(*tensors: Tensor) -> bool:
    """Return whether a kernel takes these: contiguous, of one dtype that it has and of one Metal device."""
    dtype, device = tensors[0].dtype, tensors[0].device
    alike = dtype in TYPES and all(each.dtype == dtype and each.device == device for each in tensors)
    plain = (type(each) in (Tensor, torch.nn.Parameter) and each.is_contiguous() for each in tensors)
    return alike and all(plain) and all(0 < each.numel() < 2**31 for each in tensors)


def differentiated(stock: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor) -> list[Any]:
    """Return the gradients of stock's result in the order of `inputs`, which can be differentiated in turn.

    A backward pass under `create_graph=True` asks for that, and a kernel's own results know no derivative.
    """
    # Aliases: an input may depend on another, as a layer's input does on its weight, and would be counted for it too.
    alias = [each if each is None else each.view_as(each) for each in inputs]
    wanted = [each for each in alias if each is not None and each.requires_grad]
    found = iter(torch.autograd.grad(stock(*alias), wanted, gradient, create_graph=True))
    return [next(found) if each is not None and each.requires_grad else None for each in alias]


def width(elements: int, most: int = 1024) -> int:
    """Return the threads of a threadgroup that shares a row of so many elements: whole simdgroups."""
    return min(most, -(-elements // SIMDGROUP) * SIMDGROUP)


def by_place(*shapes: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of (batch, heads, places, width), a place's heads side by side: those of all where that can be.

    What a model's `transpose(1, 2).contiguous()` asks for then, and the gradient of a joint projection, is a view.
    """
    if len({(shape[0], *shape[2:]) for shape in shapes}) > 1:
        return tuple(found for shape in shapes for found in by_place(shape, like=like))
    batch, _, places, width = shapes[0]
    heads = [shape[1] for shape in shapes]
    whole = torch.empty(batch, places, sum(heads), width, dtype=like.dtype, device=like.device)
    return tuple(part.transpose(1, 2) for part in torch.split(whole, heads, 2))


def threshold(dropout: float) -> int:
    """Return the number that DRAWN random bits have to reach for dropout to keep."""
    # At least 1 for any dropout: to the kernels 0 means that there is none, and they write no gradient of its input.
    return max(int(dropout > 0), round(dropout * (1 << DRAWN)))


def drawn(count: int) -> tuple[int, int]:
    """Return the seed and offset of the next `count` numbers of the device's generator, and move it on by as many.

    PyTorch's own kernels draw so (Distributions.mm): both are numbers of the host, which launches nothing for them, and
    a state of the generator that was saved gives the same draw again. The seed is an int64, as kernels take it.
    """
    # torch.mps gets and sets its state by public functions, but not its offset.
    generator = torch.mps._get_default_mps_generator()
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + count)
    return seed - (seed >> 63 << 64), offset


def kept(draw: tuple[int, int], dropout: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return what dropout keeps of a tensor of `shape`, as the kernels draw it: bools.

    The first of Philox 4x32-10's four numbers (Salmon and others, Parallel Random Numbers: As Easy as 1, 2, 3, SC11),
    counted from the draw's offset on.
    """
    low, (seed, offset) = 2**32 - 1, draw
    place = torch.arange(offset, offset + math.prod(shape), device=device)
    x, y, z, w = place & low, place >> 32, place & 0, place & 0
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        one, other = 0xD2511F53 * x, 0xCD9E8D57 * z  # what is above 64 bits is lost, and a shift's copies of the sign
        x, y, z, w = (other >> 32 & low) ^ y ^ keys[0], other & low, (one >> 32 & low) ^ w ^ keys[1], one & low
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return (x >> 32 - DRAWN >= threshold(dropout)).view(*shape)
