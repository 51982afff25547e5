"""huge-cat: tensors of more than 2^31 elements are put together in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel

LIMIT = 2**31
"""Elements; offsets beyond are negative in the 32 bits that the kernel keeps them in."""


class HugeCat(Guard):
    """Stands before torch.cat, below autograd, on the releases that have the fault; stack and hstack come through it.

    Evaluation meets it, where Trainer collects the logits of a vocabulary on the device.
    """

    name = "huge-cat"
    what = "torch.cat to more than 2^31 elements, or of a view into as many, loses rows and writes over other tensors"
    untried = "a trial would take gigabytes, and could write over other tensors"

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernels before the device's."""
        return {f"aten::{name}": Kernel("_in_parts", when=_huge) for name in ("cat", "cat.out")}

    def _in_parts(self, stock: OriginalCall, tensors: Any, dim: int = 0, *, out: Any = None) -> Any:
        named = {} if out is None else {"out": out}
        if not self.needed:
            return stock(tensors, dim, **named)
        self.acted(f"tensors of more than {LIMIT:,} elements are put together in parts", aloud=False)
        return stock.foreign(together, tensors, dim, **named)


def _huge(tensors: Any, dim: int = 0, *, out: Any = None) -> bool:
    count = 0
    for tensor in tensors:
        count += tensor.numel()
        if not tensor.is_contiguous() and _span(tensor) > LIMIT:
            return True
    return count > LIMIT or (out is not None and _span(out) > LIMIT)


def _span(tensor: Any) -> int:
    """How far its last element lies from its first, in elements."""
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() <= LIMIT:
        return 0
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def together(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """What torch.cat returns, put together of parts that reach over no more than LIMIT elements each.

    Raises what torch.cat raises for tensors that do not fit together.
    """
    import torch

    shapes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    wanted = torch.cat(shapes, dim)
    if out is None:
        out = torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype, device=tensors[0].device)
    elif out.shape != wanted.shape:
        out.resize_(wanted.shape)
    _fill(out, [each for each in tensors if each.numel()], dim % max(1, wanted.dim()))
    return out


def _fill(out: Any, tensors: list[Any], dim: int) -> None:
    import torch

    if len(tensors) == 1:
        _copy(out, tensors[0])
    elif dim == 0:
        start = 0
        for each in tensors:
            _copy(out.narrow(0, start, each.shape[0]), each)
            start += each.shape[0]
    elif _small(out, *tensors):
        torch.cat(tensors, dim, out=out)
    elif out.shape[0] == 1:
        _fill(out[0], [each[0] for each in tensors], dim - 1)
    else:
        for half in _halves(out):
            _fill(out[half], [each[half] for each in tensors], dim)


def _copy(into: Any, source: Any) -> None:
    if _small(into, source) or into.dim() == 0:
        into.copy_(source)
    elif into.shape[0] == 1:
        _copy(into[0], source[0])
    else:
        for half in _halves(into):
            _copy(into[half], source[half])


def _small(*tensors: Any) -> bool:
    return all(max(each.numel(), _span(each)) <= LIMIT for each in tensors)


def _halves(tensor: Any) -> tuple[slice, slice]:
    middle = tensor.shape[0] // 2
    return slice(0, middle), slice(middle, tensor.shape[0])


GUARD = HugeCat()
