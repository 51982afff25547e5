"""expanded-operands: a matrix product of a tensor that was expanded is given a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried

OPERATORS = {
    "expanded-mm": (0, ("mm", "mm.out")),
    "expanded-operands": (1, ("addmm", "addmm.out", "addmm_")),
    "expanded-gradient": (1, ("linear_backward",)),
}
"""Fault in hf_mps/metal/device/faults.py -> which argument is the first of the two that are multiplied, and the
operators."""


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

    @property
    def patches(self) -> dict[str, Kernel]:
        """Its kernels before those of the operators that this release and macOS may get wrong."""
        return {
            f"aten::{name}": Kernel("_filled", first, when=partial(_expanded, first), faults=(fault,))
            for fault, (first, names) in OPERATORS.items()
            for name in names
        }

    def _filled(self, first: int, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        if not self.needed:
            self.release()
            return stock(*args, **kwargs)
        self.acted("products of expanded tensors are given copies of them", aloud=False)
        pair = (each.contiguous() for each in args[first : first + 2])
        return stock(*args[:first], *pair, *args[first + 2 :], **kwargs)


def _expanded(first: int, *args: Any, **_: Any) -> bool:
    return 0 in args[first].stride() or 0 in args[first + 1].stride()


def _right(run: Callable[[Any, Any], Any]) -> bool:
    """Whether one number for 64 rows, times 16 ones, is one everywhere."""
    import torch

    one = torch.ones(1, 1, device="mps")
    return bool((run(one.expand(64, 1), one.expand(1, 16).contiguous()) == 1).all().cpu())


def _of_linear(grad: Any, weight: Any) -> Any:
    import torch

    return torch.ops.aten.linear_backward(grad @ weight, grad, weight, [True, False, False])[0]


TRIALS: dict[str, Callable[[Any, Any], Any]] = {
    "mm": lambda one, other: one @ other,
    "addmm": lambda one, other: (other[0] * 0).addmm(one, other),
    "linear_backward": _of_linear,
}

GUARD = ExpandedOperands({name: partial(_right, run) for name, run in TRIALS.items()})
