"""huge-products: batched matrix products of more than 2^32 elements are computed in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel
from hf_mps.metal.device import machine

LIMIT = 2**32
"""Elements, of the result or of one of the two that are multiplied, beyond which a product is wrong."""

Part = tuple[slice, slice, slice]
"""Which matrices of the batch, rows and columns of the result."""


class HugeProducts(Guard):
    """Stands before bmm and baddbmm, below autograd, on Macs whose memory holds so much in one tensor.

    Attention scores that a model computes itself reach it: 384 heads in a batch at 4,096 tokens are 1.5 times 2^32
    elements, and their gradients are products of them. Metal takes large results for products of tensors that lie in
    the order of their dimensions, which transposed keys do not, and counts the elements of large inputs in 32 bits.
    """

    name = "huge-products"
    what = (
        "batched matrix products of more than 2^32 elements, as attention scores of large batches and long texts, are"
        " wrong in both directions"
    )
    until = "pytorch#197636 is closed and the oldest supported torch has its fix"
    untried = "a trial would take 9 GB"

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernels before the device's."""
        return {
            f"aten::{name}": Kernel("_in_parts", function, when=partial(_huge, first))
            for name, (function, first) in OPERATORS.items()
        }

    def applies(self) -> Choice[bool]:
        """Whether this Mac can hold such a tensor; a trial would take 9 GB."""
        if not _fits():
            return Choice(False, "a tensor of so many elements does not fit into one buffer of this Mac's memory")
        return super().applies()

    def concerns(self, module: ModuleType) -> bool:
        """Whether a tensor of that size fits."""
        return super().concerns(module) and _fits()

    def _in_parts(self, function: Callable[..., Any], stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not self.needed:
            return stock(*args, **kwargs)
        self.acted(f"batched products of more than {LIMIT:,} elements are computed in parts", aloud=False)
        return stock.foreign(function, *args, **kwargs)


def _fits() -> bool:
    """Whether a buffer can hold more elements of two bytes: MTLDevice.maxBufferLength is half of a small Mac's memory.

    Of a larger one's it is more; and nothing could be done with a tensor that takes all of the rest.
    """
    return machine.present().memory > 2 * 2 * LIMIT


def _huge(first: int, *args: Any, **_: Any) -> bool:
    one, other = args[first], args[first + 1]
    if one.dim() != 3 or other.dim() != 3:
        return False  # an error of its own
    result = one.shape[0] * one.shape[1] * other.shape[2]
    return bool(max(result, one.numel(), other.numel()) > LIMIT and result > 1)  # of one sum nothing can be cut off


def parts(batch: int, rows: int, inner: int, columns: int) -> Iterator[Part]:
    """How a product of (batch, rows, inner) by (batch, inner, columns) is cut: no part has more than LIMIT elements.

    Halves of the batch, and of a single matrix's rows or columns where it is too large by itself. A single sum stays
    whole, however long it is.
    """

    def cut(*where: slice) -> Iterator[Part]:
        b, m, n = (each.stop - each.start for each in where)
        if max(b * m * n, b * m * inner, b * inner * n) <= LIMIT or b * m * n == 1:
            yield where  # type: ignore[misc]
            return
        axis = 0 if b > 1 else 1 if m > 1 and (m * max(n, inner) > LIMIT or n == 1) else 2
        middle = (where[axis].start + where[axis].stop) // 2
        for half in (slice(where[axis].start, middle), slice(middle, where[axis].stop)):
            yield from cut(*where[:axis], half, *where[axis + 1 :])

    yield from cut(slice(0, batch), slice(0, rows), slice(0, columns))


def _cut(one: Any, other: Any) -> Iterator[tuple[Part, Any, Any]]:
    batch, rows, inner = one.shape
    for b, m, n in parts(batch, rows, inner, other.shape[2]):
        yield (b, m, n), one[b, m], other[b, :, n]


def _bmm(one: Any, other: Any, *, out: Any = None) -> Any:
    import torch

    shape = one.shape[0], one.shape[1], other.shape[2]
    out = one.new_empty(shape) if out is None else out.resize_(shape)
    for where, rows, columns in _cut(one, other):
        torch.bmm(rows, columns, out=out[where])
    return out


def _baddbmm(given: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    import torch

    shape = one.shape[0], one.shape[1], other.shape[2]
    out = one.new_empty(shape) if out is None else out.resize_(shape)
    given = given.expand(shape)
    for where, rows, columns in _cut(one, other):
        torch.baddbmm(given[where], rows, columns, beta=beta, alpha=alpha, out=out[where])
    return out


def _in_place(given: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    for where, rows, columns in _cut(one, other):
        given[where].baddbmm_(rows, columns, beta=beta, alpha=alpha)
    return given


# Operator -> what takes its place, and which argument is the first of the two that are multiplied.
OPERATORS: dict[str, tuple[Callable[..., Any], int]] = {
    "bmm": (_bmm, 0),
    "bmm.out": (_bmm, 0),
    "baddbmm": (_baddbmm, 1),
    "baddbmm.out": (_baddbmm, 1),
    "baddbmm_": (_in_place, 1),
}

GUARD = HugeProducts()
