"""A kernel's bitcode to an object file of this CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import llvmlite.binding as llvm

from hf_mps.metal.kernels import intrinsics
from hf_mps.metal.kernels.lowering import checks, entry, lanes, rows, simdgroups
from hf_mps.metal.kernels.lowering.flatten import Flat, flatten, joined, target
from hf_mps.metal.kernels.signature import Signature


@dataclass(frozen=True)
class Compiled:
    """An object file, and what a launch must know of it."""

    code: bytes
    threadgroup_bytes: int
    """Threadgroup memory that the kernel declares; what the host asks for follows it."""


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
        text = joined(steps.text, simdgroups.waiting(signature, steps, checked=checked))
    else:
        text = _looped(signature, flat, checked)
    module = llvm.parse_assembly(joined(text, _runtime()))
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_interleaving = True
    # The copies of a kernel whose threads wait (simdgroups.py) take twice the time to compile when unrolled, and run
    # no faster.
    tuning.loop_unrolling = not suspends
    builder = llvm.create_pass_builder(target(), tuning)
    builder.getModulePassManager().run(module, builder)
    return Compiled(target().emit_object(module), flat.threadgroup_bytes)


def _looped(signature: Signature, flat: Flat, checked: bool) -> str:
    # Inlined into the loop over threads, which LLVM can make vectors of then.
    head = re.compile(r"^define dso_local void (@kernel\(.*)\{$", re.MULTILINE)
    kernel = head.sub(r"define internal void \1alwaysinline {", flat.text)
    if checked:
        return joined(kernel, entry.loops(signature, checked=True))
    dimensions = next((each.parameter for each in signature.bindings if each.name.startswith("ndim")), None)
    versions = rows.versions(kernel, dimensions) if dimensions is not None else ""
    if versions:
        return _one_space(joined(kernel, versions, entry.loops(signature, dimensions=dimensions)))
    asked = rows.question(flat.text)
    if asked is None:
        return _one_space(joined(kernel, entry.loops(signature)))
    return _one_space(joined(kernel, asked.text, entry.loops(signature, ordinary=asked.ordinary)))


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
