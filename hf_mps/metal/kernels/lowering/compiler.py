"""A kernel's bitcode to an object file of this CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import llvmlite.binding as llvm

from hf_mps.metal.kernels import intrinsics
from hf_mps.metal.kernels.lowering import checks, entry, lanes, rows
from hf_mps.metal.kernels.lowering.flatten import flatten, joined, optimised, target
from hf_mps.metal.kernels.signature import Compiled, Signature


def compile_kernel(signature: Signature, bitcode: bytes, *, checked: bool = False) -> Compiled:
    """Compile a kernel for this CPU.

    Raises:
        RunError: the kernel needs an intrinsic or a thread attribute whose meaning is not known here.
    """
    flat = flatten(signature.name, bitcode)
    # A kernel that asks for its lane needs whole simdgroups too, though none of its threads waits; and plain loops know
    # of no threadgroup memory that the kernel declares.
    suspends = bool(flat.crossing) or "@hf.lane()" in flat.text or "@hf.threadgroup(" in flat.text
    if checked:
        flat = replace(flat, text=checks.checked(flat.text, signature))
    if suspends:
        # A checked access tells its thread, so that none is done once for the group.
        steps = lanes.steps(flat, frozenset() if checked else entry.uniform(signature))
        text = joined(steps.text, lanes.waiting(signature, steps, checked=checked))
    else:
        # Inlined into the loop over threads, which LLVM can make vectors of then.
        head = re.compile(r"^define dso_local void (@kernel\(.*)\{$", re.MULTILINE)
        kernel = head.sub(r"define internal void \1alwaysinline {", flat.text)
        dimensions = next((each.parameter for each in signature.bindings if each.name.startswith("ndim")), None)
        row = rows.Row(rows.plain) if checked else rows.of(kernel, dimensions)
        text = joined(kernel, row.text, entry.loops(signature, row.loop, checked))
        text = text if checked else _one_space(text)
    # The copies of a kernel whose threads wait (lanes.py) take twice the time to compile when unrolled, and run
    # no faster.
    module = optimised(joined(text, _runtime()), unrolled=not suspends)
    return Compiled(signature, flat.threadgroup_bytes, target().emit_object(module))


def _one_space(text: str) -> str:
    """The module with device and constant memory as plain memory.

    LLVM's vectoriser compares the addresses of two buffers at run time only where both are of one address space.
    """
    text = re.sub(r" addrspace\([12]\)", "", text)
    return re.sub(r"\baddrspacecast (\(?)ptr (\S+) to ptr(?! addrspace)", r"bitcast \1ptr \2 to ptr", text)


@cache
def _runtime() -> str:
    """Conversions that this CPU has no instructions for, which LLVM calls by compiler-rt's names."""
    lacking = intrinsics.lacking(llvm.get_host_cpu_features())
    return "\n".join(part for each in lacking for part in (*each.declares, each.text))
