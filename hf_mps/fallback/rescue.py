"""Opt-in: where an operator's Metal kernel refuses a call (a dtype, a size), the CPU takes just that call.

Each Metal kernel is put behind a function that calls it and catches the refusal; below autograd and in every thread.
Costs a few microseconds for each operator, and nothing where it was not chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from hf_mps.fallback import notice, operators, register
from hf_mps.fallback.kernels import Kernel
from hf_mps.fallback.ledger import ledger
from hf_mps.fallback.schema import Plan

# What Metal's kernels say when they refuse, in torch 2.8 to 2.13 (aten/src/ATen/native/mps, EmptyTensor.cpp).
REFUSALS = re.compile(
    r"\bMPS\b.*(support|implement)|(support|implement).*\bMPS\b|on MacOS|Failed to create function state object", re.I
)
# These make memory or move it; what they refuse the CPU cannot give them either, a float64 tensor on Metal above all.
MEMORY = re.compile(r"^aten::(_?copy_|_copy_from|set_|resize_|empty|new_empty|_local_scalar_dense|item|is_set_to|_pin)")
# Metal's refusal of float64 inside a composite operator comes from its conversion.
CONVERSION = "aten::_to_copy"


def available() -> bool:
    """Whether this torch hands out the kernels that it has (`torch.library.get_kernel`, 2.9 and later)."""
    return hasattr(torch.library, "get_kernel")


def start(*, share: bool) -> None:
    """Put every Metal kernel that the CPU could stand in for behind a rescue; those there already stay as they are."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key
    elsewhere = set(names("CPU")) | set(names("CompositeExplicitAutograd"))
    given = set(register.registered())
    for name in sorted((set(names("MPS")) & elsewhere) - given):
        give(name, "MPS", share=share)
    give(CONVERSION, "CompositeExplicitAutograd", share=share)


def give(name: str, key: str, *, share: bool) -> None:
    """Put the kernel that operator `name` has under `key` behind a rescue on Metal, if the CPU could stand in."""
    if MEMORY.match(name) or operators.refusal(name) is not None:
        return
    op = operators.overload(name)
    if not any("Tensor" in str(argument.type) for argument in op._schema.arguments):
        return  # a factory
    register.put(name, "MPS", _guarded(op, torch.library.get_kernel(name, key), share), with_keys=True)


def _guarded(op: Any, metal: Any, share: bool) -> Callable[..., Any]:
    cpu: list[Kernel] = []  # made when it is first needed

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return metal.call_boxed(keys, *args, **kwargs)
        except (NotImplementedError, TypeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            if not REFUSALS.search(reason) or "out of memory" in reason:
                raise
            start = perf_counter()
            if not cpu:
                cpu.append(Kernel(Plan.of(op), ledger.slot(op.name()), share=share))
            notice.rescued(op.name(), (*args, *kwargs.values()), reason)
            try:
                with torch._C.DisableTorchFunction():
                    return cpu[0].run(start, args, kwargs)
            except Exception:
                raise error from None

    return kernel
