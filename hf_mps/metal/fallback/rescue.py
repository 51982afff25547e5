"""Opt-in: where an operator's Metal kernel refuses a call (a dtype, a size), the CPU takes just that call.

Every operator is called through a TorchDispatchMode that catches the refusal: below autograd, whose threads take the
mode over, and in each thread that Python starts. It costs some microseconds for each operator, and nothing where it was
not chosen. Kernels put in front of Metal's would be quicker, but PyTorch hands them the number of `x * 2` as a plain
float, which torch.library.get_kernel's kernels refuse.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mps.metal.fallback.accounting import ledger, warn_refused
from hf_mps.metal.fallback.kernel import Kernel
from hf_mps.metal.fallback.op_schema import OpSchema
from hf_mps.metal.operators import dispatcher

# What Metal's kernels say when they refuse, in torch 2.13 and 2.14 (aten/src/ATen/native/mps, EmptyTensor.cpp): before
# they compute anything, so that a tensor that the operator writes is as it was.
REFUSALS = re.compile(
    r"\bMPS\b.*(support|implement)|(support|implement).*\bMPS\b|on MacOS|Failed to create function state object"
    r"|^Adaptive pool MPS|^Convolution is supported only|^MPSGr?aph does not support"
    r"|more than INT_MAX elements|2\*\*32 (elements|entries)",
    re.I,
)
# The errors from inside an operator for want of a kernel, at whatever point it is: native/DispatchStub.cpp, and the
# AT_DISPATCH macros of ATen/Dispatch.h ("nansum_mps" not implemented for 'Long').
UNSERVED = re.compile(r"DispatchStub: (missing kernel for|unsupported device type)|^\S+ not implemented for '\w+'")
# These make memory or move it; what they refuse the CPU cannot give them either, a float64 tensor on Metal above all.
# The exception is a conversion: composite operators have float64 inside, and their last word is float32.
MEMORY = re.compile(r"^aten::(_?copy_|_copy_from|set_|resize_|empty|new_empty|_local_scalar_dense|item|is_set_to|_pin)")


class Rescue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls each operator, and lets the CPU do what Metal refuses."""

    def __init__(self, *, share: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._share = share
        self._kernels: dict[Any, Kernel] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, TypeError, RuntimeError) as error:
            start = perf_counter()
            reason = str(error).partition("\n")[0]
            if not _refused(func, reason) or not _can_stand_in(func, args, kwargs):
                raise
            if func not in self._kernels:
                self._kernels[func] = Kernel(OpSchema.of(func), ledger.stats(func.name()), share=self._share)
            # The error's first sentence, or what it says of the kernel that is missing.
            unserved = UNSERVED.search(reason)
            short = reason[unserved.start() :] if unserved else reason.partition(". ")[0]
            warn_refused(func.name(), (*args, *kwargs.values()), short)
            try:
                with torch._C.DisableTorchFunction():
                    return self._kernels[func].run(start, args, kwargs)
            except Exception:
                raise error from None


def start() -> None:
    """Enter the mode in this thread and in those that are started from now on; there is no way back."""
    mode = Rescue()
    # Not Thread.run, which subclasses replace.
    stock: Callable[[Any], None] = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: threading.Thread) -> None:
        with mode:
            stock(self)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
    mode.__enter__()  # type: ignore[no-untyped-call]


def _refused(func: Any, reason: str) -> bool:
    """Return whether an error is Metal's for want of a kernel, and left what the operator writes as it was."""
    if "out of memory" in reason:
        return False
    if REFUSALS.search(reason):
        return True
    if not UNSERVED.search(reason):
        return False
    # What an out= argument held counts for nothing; what an operator changes in place may be changed in part.
    inputs = (argument for argument in func._schema.arguments if not argument.is_out)
    return not any(argument.alias_info and argument.alias_info.is_write for argument in inputs)


def _can_stand_in(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether real device tensors came in, and the CPU can do the same without breaking a promise of the operator."""
    name = func.name()
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    there = plain and any(tensor.is_mps for tensor in tensors)
    return there and not MEMORY.match(name) and dispatcher.refusal(name) is None
