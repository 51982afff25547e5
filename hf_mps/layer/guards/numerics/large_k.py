"""large-k: matrix products that sum over more than 32,766 values are added up from shorter ones, on M1 and M2.

Before torch 2.14 that is for the right result; later too for batches, and for sums over 32,767 and 32,768 values
(pytorch#195163). For all else it is for speed from 2.14 on: PyTorch hands longer sums to a kernel of its own (pytorch
PR 183535), which reached 1.1 to 1.4 TFLOPS on an M4 Max where MPSGraph reached 8 to 12 (pytorch#198182).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel
from hf_mps.metal.device import faults, machine

LONGEST = 32766
"""Values in one sum; 32,767 is wrong by one of them (pytorch#195163)."""
SIDE = 16
"""Rows and columns of a result from which on the kernel is used that has the fault (pytorch PR 183535)."""
PART = 16384


class LargeK(Guard):
    """Splits sums in mm, addmm, bmm, baddbmm, linear and linear's backward, below autograd, so in every program.

    What sums over so much: the gradient that a language model's head sends to the layer below (its vocabulary), the
    gradient of a weight over a large batch (its tokens), and a layer as wide. Up to float32's rounding the result is
    the same; half precision is added up in float32.
    """

    name = "large-k"
    what = (
        "on M1 and M2 a matrix product that sums over more than 32,766 values also sums what lies behind its operands:"
        " wrong gradients below a large vocabulary and of large batches; from torch 2.14 on right but for batches, and"
        " several times slower"
    )
    until = "the oldest supported torch is 2.14 and pytorch#195163 and #198182 are closed"

    @property
    def patches(self) -> dict[str, Kernel]:
        """Its kernels before the device's."""
        products = {
            f"aten::{name}": Kernel("_split", function, first, when=partial(_enough, first))
            for name, (function, first) in PRODUCTS.items()
        }
        linear = {"aten::linear": "_linear", "aten::linear_backward": "_linear_backward"}
        return products | {name: Kernel(method, when=partial(_enough, 1)) for name, method in linear.items()}

    def applies(self) -> Choice[bool]:
        """Whether the chip has the fault, or is slow at such products because the release works around it."""
        found = super().applies()
        if found.value or not faults.possible(*self.faults):
            return found
        import torch

        # M3 and later clip the last tile; 2.14 has a kernel of its own for long sums of two matrices (PR 183535).
        wrong = faults.possible("large-k")
        why = "has the fault, whatever a trial found," if wrong else "multiplies over so many values with a slow kernel"
        return Choice(True, f"torch {torch.__version__} {why} on {machine.present().chip}")

    def trial(self) -> Choice[bool]:
        """Whether such products differ from the CPU's; memory that is zero behind the operands hides the fault."""
        with self.left_alone():
            wrong = [name for name, run in _trials().items() if not _right(run)]
        if wrong:
            return Choice(True, f"tried on the device: {', '.join(wrong)} over 40,009 values differ from the CPU")
        return Choice(False, "tried on the device: mm, bmm and linear over 40,009 values are right")

    def _long(self, values: int, rows: int, columns: int) -> bool:
        """Whether a product that sums over `values` has to be split; asks `applies` at the first one."""
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


def _enough(which: int, *args: Any, **_: Any) -> bool:
    """Whether one argument, a factor of each sum or a gradient, has values enough for a sum that is too long."""
    return bool(args[which].numel() > LONGEST)


def _product(left: Any, other: Any) -> Any:
    """`left @ other` for matrices or batches of them, added up over parts of the inner dimension."""
    import torch

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


def _into(function: Callable[..., Any], *args: Any, out: Any, **kwargs: Any) -> Any:
    found = function(*args, **kwargs)
    return out.resize_(found.shape).copy_(found)


def _in_place(given: Any, *args: Any, **kwargs: Any) -> Any:
    return given.copy_(_added(given, *args, **kwargs))


# Operator -> what takes its place, and which argument is the first of the two matrices.
PRODUCTS: dict[str, tuple[Callable[..., Any], int]] = {
    "mm": (_product, 0),
    "mm.out": (partial(_into, _product), 0),
    "bmm": (_product, 0),
    "bmm.out": (partial(_into, _product), 0),
    "addmm": (_added, 1),
    "addmm.out": (partial(_into, _added), 1),
    "addmm_": (_in_place, 1),
    "baddbmm": (_added, 1),
    "baddbmm.out": (partial(_into, _added), 1),
    "baddbmm_": (_in_place, 1),
}


def _trials() -> dict[str, Callable[[Any, Any], Any]]:
    import torch

    return {
        "mm": torch.mm,
        "bmm": lambda one, other: torch.bmm(one[None], other[None])[0],
        "linear": lambda one, other: torch.nn.functional.linear(one, other.t()),
    }


def _right(run: Callable[[Any, Any], Any]) -> bool:
    """Whether a product over 40,009 values is the CPU's, right after other memory was filled and freed.

    What is read behind the operands is zero in fresh memory, and the product is right then.
    """
    import torch

    pattern = torch.arange(64 * 40009, dtype=torch.float32).remainder_(31).sub_(15).div_(15)
    one, other = pattern.view(64, 40009), pattern.flip(0).view(40009, 64)
    there = one.to("mps"), other.to("mps")
    filled = torch.full((2**24,), 1e4, device="mps")
    torch.mps.synchronize()
    del filled
    return torch.allclose(run(*there).cpu(), run(one, other), rtol=1e-3, atol=1.0)


GUARD = LargeK()
