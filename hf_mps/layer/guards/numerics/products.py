"""Guards of matrix products.

large-k: long products are added up from shorter ones, on M1 and M2.
sliced-products: a matrix product into a slice or into gaps is computed apart and copied.
expanded-operands: a matrix product of an expanded tensor is given a copy of it.
linear-bias: a linear layer adds its bias in a separate step.
linear-shapes: the gradients of a linear layer are those of matrices.
huge-products: huge batched products are computed in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards.base import Guard, tried
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried, in_place_of
from hf_mps.metal.device import faults, machine

LONGEST = 32766
"""Values in one sum; 32,767 is wrong by one of them (pytorch#195163)."""
SIDE = 16
"""Rows and columns of a result from which on the kernel is used that has the fault (pytorch PR 183535)."""
# Parts of this length are below LONGEST, and half of it or more: they stay few.
PART = 16384


def _enough(which: int, *args: Any, **_: Any) -> bool:
    """Return whether one argument, a factor of each sum or a gradient, has values enough for a sum that is too long."""
    return bool(args[which].numel() > LONGEST)


def _product(left: Any, other: Any) -> Any:
    """`left @ other` for matrices or batches of them, added up over parts of the inner dimension."""
    half = left.dtype in (torch.float16, torch.bfloat16)
    total: Any = None
    for start in range(0, left.shape[-1], PART):
        part, beside = left[..., start : start + PART], other[..., start : start + PART, :]
        if total is None:
            total = part @ beside
            total = total.float() if half else total
        elif half:
            total += part @ beside
        else:
            (total.addmm_ if total.dim() == 2 else total.baddbmm_)(part, beside)
    return total.to(left.dtype)


def _added(given: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    found = _product(one, other)
    found = found if alpha == 1 else found * alpha
    return found if beta == 0 else found + (given if beta == 1 else given * beta)


def _placed(name: str, function: Callable[..., Any], *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Return what a function makes where an operator of that name puts its own: in `out`, over the first, or anew."""
    found = function(*args, **kwargs)
    place = args[0] if name.endswith("_") else out
    return found if place is None else place.resize_(found.shape).copy_(found)


# Operator -> what takes its place, and which argument is the first of the two matrices.
PRODUCTS: dict[str, tuple[Callable[..., Any], int]] = {
    **{name: (partial(_placed, name, _product), 0) for name in ("mm", "bmm", "mm.out", "bmm.out")},
    **{
        f"{name}{out}": (partial(_placed, out, _added), 1) for name in ("addmm", "baddbmm") for out in ("", ".out", "_")
    },
}


class LargeK(Guard):
    """Splits sums in mm, addmm, bmm, baddbmm, linear and linear's backward, below autograd, so in every program.

    What sums over so much: the gradient that a language model's head sends to the layer below (its vocabulary), the
    gradient of a weight over a large batch (its tokens), and a layer as wide. Up to float32's rounding the result is
    the same; half precision is added up in float32.
    """

    name = "large-k"
    what = (
        "on M1 and M2 a matrix product that sums over more than 32,766 values also sums memory beyond its operands:"
        " wrong gradients below a large vocabulary and of large batches; from torch 2.14 on right but for batches, and"
        " several times slower"
    )
    until = "the oldest supported torch is 2.14 and pytorch#195163 and #198182 are closed"

    patches = {
        f"aten::{name}": Kernel("_split", function, first, when=partial(_enough, first))
        for name, (function, first) in PRODUCTS.items()
    } | {f"aten::{name}": Kernel(f"_{name}", when=partial(_enough, 1)) for name in ("linear", "linear_backward")}

    def applies(self) -> Choice[bool]:
        """Return whether the chip has the fault, or is slow at such products because the release works around it."""
        found = super().applies()
        if found.value or not faults.possible(*self.faults):
            return found
        # M3 and later clip the last tile; 2.14 has its own kernel for long sums of two matrices (PR 183535).
        wrong = faults.possible("large-k")
        why = "has the fault, whatever a trial found," if wrong else "multiplies over so many values with a slow kernel"
        return Choice(True, f"torch {torch.__version__} {why} on {machine.present().chip}")

    def trial(self) -> Choice[bool]:
        """Whether such products differ from the CPU's; memory that is zero behind the operands hides the fault."""
        with self.left_alone():
            trials: dict[str, Callable[[Any, Any], Any]] = {
                "mm": torch.mm,
                "bmm": lambda one, other: torch.bmm(one[None], other[None])[0],
                "linear": lambda one, other: torch.nn.functional.linear(one, other.t()),
            }
            wrong = [name for name, run in trials.items() if not _large_k_right(run)]
        differ = f"{', '.join(wrong)} over 40,009 values differ from the CPU"
        return tried(bool(wrong), differ, "mm, bmm and linear over 40,009 values are right")

    def _long(self, values: int, rows: int, columns: int) -> bool:
        """Return whether a product that sums over `values` has to be split; asks `applies` at the first one."""
        if values <= LONGEST or rows < SIDE or columns < SIDE or not self.needed:
            return False
        self.acted(
            f"products that sum over more than {LONGEST:,} values are added up from parts of {PART:,}", aloud=False
        )
        return True

    def _split(self, function: Callable[..., Any], first: int, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        one, other = args[first], args[first + 1]
        matrices = one.dim() == other.dim() > 1 and one.is_floating_point()
        if matrices and self._long(one.shape[-1], one.shape[-2], other.shape[-1]):
            return stock.foreign(function, *args, **kwargs)
        return stock(*args, **kwargs)

    def _linear(self, stock: OriginalCall, rows: Any, weight: Any, bias: Any = None) -> Any:
        if weight.dim() != 2 or not weight.is_floating_point():
            return stock(rows, weight, bias)
        out, width = weight.shape
        if not self._long(width, rows.numel() // max(1, width), out):
            return stock(rows, weight, bias)

        def split() -> Any:
            found = _product(rows.reshape(-1, width), weight.t())
            return (found if bias is None else found + bias).view(*rows.shape[:-1], out)

        return stock.foreign(split)

    def _linear_backward(self, stock: OriginalCall, rows: Any, grad: Any, weight: Any, mask: Any) -> Any:
        out, width = weight.shape if weight.dim() == 2 else (1, 1)
        count = grad.numel() // max(1, out)
        below, own = mask[0] and self._long(out, count, width), mask[1] and self._long(count, out, width)
        if not below and not own:
            return stock(rows, grad, weight, mask)

        def split() -> Any:
            flat, matrix = grad.reshape(-1, out), rows.reshape(-1, width)
            of_rows = (_product(flat, weight) if below else flat @ weight).view(rows.shape) if mask[0] else None
            of_weight = (_product(flat.t(), matrix) if own else flat.t() @ matrix) if mask[1] else None
            return of_rows, of_weight, flat.sum(0) if mask[2] else None

        return stock.foreign(split)


def _large_k_right(run: Callable[[Any, Any], Any]) -> bool:
    """Return whether a product over 40,009 values is the CPU's, right after other memory was filled and freed."""
    pattern = torch.arange(64 * 40009, dtype=torch.float32).remainder_(31).sub_(15).div_(15)
    one, other = pattern.view(64, 40009), pattern.flip(0).view(40009, 64)
    there = one.to("mps"), other.to("mps")
    # What is read behind the operands is zero in fresh memory, and the product is right then.
    filled = torch.full((2**24,), 1e4, device="mps")
    torch.mps.synchronize()
    del filled
    return torch.allclose(run(*there).cpu(), run(one, other), rtol=1e-3, atol=1.0)


SLICED = {
    **dict.fromkeys(("mm.out", "bmm.out", "addmm.out", "addmm_"), ("sliced-products", "gapped-products")),
    **dict.fromkeys(("baddbmm.out", "baddbmm_"), ("sliced-baddbmm", "gapped-baddbmm")),
}
"""Operator -> its faults in hf_mps/metal/device/faults.py."""


def _sliced(*args: Any, out: Any = None, **_: Any) -> bool:
    """Whether the result's memory has an offset or gaps; of another dtype it is an error of the operator's own."""
    place = args[0] if out is None else out
    return place.dtype == args[-1].dtype and (place.storage_offset() > 0 or not place.is_contiguous())


def _slices_right(name: str) -> bool:
    """Whether it writes into the second of two matrices, and into the first half of each row, and nowhere else."""

    def written(device: str) -> Any:
        one = torch.arange(64.0, device=device).view(8, 8)
        pair = (one.unsqueeze(0),) * 2 if name.startswith("b") else (one, one)
        matrices, columns = torch.zeros(2, *pair[0].shape, device=device), torch.cat([pair[0] * 0] * 2, -1)
        for place in (matrices[1], columns[..., :8]):
            getattr(torch, name)(*pair[: "add" in name], *pair, out=place)
        return torch.cat([matrices.flatten(), columns.flatten()]).cpu()

    return torch.allclose(written("mps"), written("cpu"), rtol=1e-2)


class SlicedProducts(Tried):
    """Stands before the products that write into a given tensor, below autograd, until a trial finds them right.

    On macOS 14 `torch.mm(a, b, out=buffer[1])` leaves the buffer as it was, and on macOS 15 a product into a part of
    each row is mis-written. Since torch 2.14 only baddbmm does this. Products that make their result (`a @ b`) are
    not touched.
    """

    name = "sliced-products"
    what = (
        "before macOS 26 a matrix product that is written into a slice or between other columns (out=, addmm_) is lost"
        " or lands beside its place; since torch 2.14 only baddbmm's is"
    )
    until = "baddbmm checks its result's memory as mm does since torch 2.14"
    given = "slices as results"
    trials = {name: partial(_slices_right, name) for name in ("mm", "bmm", "addmm", "baddbmm")}
    patches = {
        f"aten::{name}": Kernel(
            partial(_placed, name, getattr(torch, name.removesuffix(".out").removesuffix("_"))),
            when=_sliced,
            says="products into slices of a tensor are computed apart and copied there",
            through=in_place_of,
            faults=faults,
        )
        for name, faults in SLICED.items()
    }


EXPANDED = {
    "expanded-mm": (0, ("mm", "mm.out")),
    "expanded-operands": (1, ("addmm", "addmm.out", "addmm_")),
    "expanded-gradient": (1, ("linear_backward",)),
}
"""Fault in hf_mps/metal/device/faults.py -> which argument is the first of the two that are multiplied, and the
operators."""


def _expanded(first: int, *args: Any, **_: Any) -> bool:
    return 0 in args[first].stride() or 0 in args[first + 1].stride()


def _expanded_right(run: Callable[[Any, Any], Any]) -> bool:
    """Return whether one number for 64 rows, times 16 ones, is one everywhere."""
    one = torch.ones(1, 1, device="mps")
    return bool((run(one.expand(64, 1), one.expand(1, 16).contiguous()) == 1).all().cpu())


def _of_linear(grad: Any, weight: Any) -> Any:
    return torch.ops.aten.linear_backward(grad @ weight, grad, weight, [True, False, False])[0]


EXPANDED_TRIALS: dict[str, Callable[[Any, Any], Any]] = {
    "mm": lambda one, other: one @ other,
    "addmm": lambda one, other: (other[0] * 0).addmm(one, other),
    "linear_backward": _of_linear,
}
FILLED = "products of expanded tensors are given copies of them"


class ExpandedOperands(Tried):
    """Stands before products of two matrices, below autograd, on the systems whose MPSGraph misreads a stride of 0.

    The gradient of a sum is one number expanded: `layer(x).sum().backward()` multiplies it by the layer's weight. A
    batch that is expanded, as the frequencies of rotary embeddings are, is right on these systems.
    """

    name = "expanded-operands"
    what = (
        "on macOS 15.0 to 26.3 and 27 a matrix product of an expanded tensor, as the gradient of a sum is, computes"
        " every 16th row alone"
    )
    until = "PyTorch copies such operands on macOS 27 and in addmm"
    given = "expanded tensors"
    trials = {name: partial(_expanded_right, run) for name, run in EXPANDED_TRIALS.items()}
    patches = {
        f"aten::{name}": Kernel("_filled", first, when=partial(_expanded, first), says=FILLED, faults=(fault,))
        for fault, (first, names) in EXPANDED.items()
        for name in names
    }

    def _filled(self, first: int, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        pair = (each.contiguous() for each in args[first : first + 2])
        return stock(*args[:first], *pair, *args[first + 2 :], **kwargs)


MATRICES = 65536
"""From the next one on the fused kernel's counter of 16 bits begins again (pytorch#189495)."""


class LinearBias(Guard):
    """Puts a kernel before the device's `linear`, below autograd, on the releases that have one of the two faults."""

    name = "linear-bias"
    what = (
        "a linear layer forgets its bias for a single row (M1 with macOS 26), and writes over rows where its input has "
        "more than 65,536 matrices"
    )
    # A call costs 2.5 µs more.
    patches = {"aten::linear": Kernel("_linear")}

    _single = _many = False  # what the trials found

    def trial(self) -> Choice[bool]:
        """Whether a linear layer's bias is wrong for one row, or for more matrices than a counter of 16 bits counts."""
        given = (torch.ones(1, 8), torch.zeros(4, 8), torch.ones(4))
        # Where the counter begins again the last of 65,537 matrices of two rows is written over the first.
        rows, one = torch.arange(MATRICES + 1.0).view(-1, 1, 1).expand(-1, 2, 1).contiguous(), torch.ones(1)
        with self.left_alone():
            found = torch.nn.functional.linear(*(each.to("mps") for each in given))
            self._single = not torch.equal(found.cpu(), torch.ones(1, 4))
            found = torch.nn.functional.linear(*(each.to("mps") for each in (rows, one.view(1, 1), one)))
            self._many = float(found[0, 0, 0].cpu()) != 1.0
        wrong = ["one row"] * self._single + [f"{MATRICES + 1:,} matrices"] * self._many
        right = f"the bias is right for one row and for {MATRICES + 1:,} matrices"
        return tried(bool(wrong), f"the bias is wrong for {' and for '.join(wrong)}", right)

    def _linear(self, stock: OriginalCall, rows: Any, weight: Any, bias: Any = None) -> Any:
        shape = rows.shape
        single, many = len(shape) < 2 or shape[-2] == 1, len(shape) > 2 and shape[-3] > MATRICES
        # `needed` is asked before what its trial found.
        concerned = bias is not None and (single or many) and self.needed
        if not concerned or not ((single and self._single) or (many and self._many)):
            return stock(rows, weight, bias)
        self.acted("linear layers add their bias in a separate step where Metal's kernel loses it", aloud=False)
        return stock.partial(rows, weight, None) + bias


DEEP = 4
"""Dimensions above which the graph flattens its input, which macOS 27 does not compile (pytorch#187201)."""


class LinearShapes(Guard):
    """Puts a kernel before the device's `linear_backward`, below autograd; a call costs 2.5 µs more then.

    F.linear takes a weight of one dimension as a matrix of one row; its backward pass does not (pytorch#187988). Either
    fault is an assertion of Apple's.
    """

    name = "linear-shapes"
    what = (
        "the backward pass of F.linear ends Python where the weight has one dimension, and on macOS 27 where the input "
        "has five or more and two of them are 1"
    )
    untried = "a trial would end Python"
    patches = {"aten::linear_backward": Kernel("_linear_backward")}

    def _linear_backward(self, stock: OriginalCall, rows: Any, grad: Any, weight: Any, mask: Any) -> Any:
        vector = weight.dim() == 1
        # The graph for this input is one that macOS 27 does not compile.
        deep = rows.dim() > DEEP and sum(size == 1 for size in rows.shape) > 1 and machine.present().macos_at_least(27)
        if not vector and not deep:
            return stock(rows, grad, weight, mask)
        what = "a weight of one dimension" if vector else "an input of many dimensions"
        self.acted(f"the gradients of a linear layer with {what} are computed as those of matrices", aloud=False)
        matrix = weight.unsqueeze(0) if vector else weight
        flat = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, matrix.shape[0])
        of_rows, of_weight, of_bias = stock.partial(*flat, matrix, mask)
        return (
            of_rows.view(rows.shape) if mask[0] else None,
            of_weight.view(weight.shape) if mask[1] else None,
            of_bias if mask[2] else None,
        )


LIMIT = 2**32
"""Elements, of the result or of one of the two that are multiplied, beyond which a product is wrong."""

Part = tuple[slice, slice, slice]
"""Which matrices of the batch, rows and columns of the result."""


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


def _in_parts(name: str, *args: Any, out: Any = None, **scales: Any) -> Any:
    """Compute `bmm`, `baddbmm` or one of their other forms in parts."""
    *given, one, other = args
    batch, rows, inner = one.shape
    shape = batch, rows, other.shape[2]
    out = args[0] if name == "baddbmm_" else one.new_empty(shape) if out is None else out.resize_(shape)
    added = [each.expand(shape) for each in given]
    product: Callable[..., Any] = torch.baddbmm if given else torch.bmm
    for b, m, n in parts(batch, rows, inner, other.shape[2]):
        product(*(each[b, m, n] for each in added), one[b, m], other[b, :, n], **scales, out=out[b, m, n])
    return out


# Operator -> which argument is the first of the two that are multiplied.
HUGE = {"bmm": 0, "bmm.out": 0, "baddbmm": 1, "baddbmm.out": 1, "baddbmm_": 1}


CUT = f"batched products of more than {LIMIT:,} elements are computed in parts"


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

    patches = {
        f"aten::{name}": Kernel(partial(_in_parts, name), when=partial(_huge, first), says=CUT, through=in_place_of)
        for name, first in HUGE.items()
    }

    def applies(self) -> Choice[bool]:
        """Return whether this Mac can hold such a tensor; a trial would take 9 GB."""
        if not _fits():
            return Choice(False, "a tensor of so many elements does not fit into one buffer of this Mac's memory")
        return super().applies()

    def concerns(self, module: ModuleType) -> bool:
        """Return whether a tensor of that size fits."""
        return super().concerns(module) and _fits()
