"""The entry of a compiled kernel: a run of threadgroups, each a loop over its threads.

For kernels whose threads wait for one another lanes.py writes the loops inside the one over groups.

    i32 entry(i64 args[64], i32 grid[9], i64 first, i64 last, ptr arena)

`args` holds the buffers' addresses by location and, from 32 on, the offsets of threadgroup memory. `grid` is the
threads of the grid, of a threadgroup, and the threadgroups, three of each; the last threadgroup of a dimension is
smaller where the threads are no multiple. Groups are numbered with x the fastest; `first` to `last` (not included) run.
`arena` is this OS thread's memory (ARENA says how it is divided). The result is 0, or 1 where the arena is too small.
"""

from __future__ import annotations

import re

from hf_mps.core.errors import RunError
from hf_mps.metal.kernels.lowering import assembly, checks, rows
from hf_mps.metal.kernels.signature import LOCATIONS, THREADGROUP, Attribute, Signature

SHARED_BYTES = 64 << 10
"""Threadgroup memory: a Mac has 32 KiB, some kernels state more than they use."""
SLOT_BYTES = 1 << 10
"""A lane's arguments, or its result, of one cross-lane operation: three matrices of 64 floats at the most."""
LANES = 1024
STATES_AT = SHARED_BYTES
POSITIONS_AT = STATES_AT + 4 * LANES
GIVEN_AT = POSITIONS_AT + 4 * 4 * LANES
RESULTS_AT = GIVEN_AT + SLOT_BYTES * LANES
FRAMES_AT = RESULTS_AT + SLOT_BYTES * LANES
FRAMES_BYTES = 64 << 20
"""What a threadgroup's threads may keep while they wait."""
ARENA_BYTES = FRAMES_AT + FRAMES_BYTES
"""Address space of an arena; the pages that no kernel touches cost nothing."""


def loops(signature: Signature, row: rows.Loop, checked: bool) -> str:
    """The entry of a kernel whose threads never wait for one another: plain loops, the innermost, `row`, along x."""
    call = f"  call void @kernel({arguments(signature, checked)})"
    made = f"{assembly('thread.ll')}\n{values(signature)}"
    return entry(signature, assembly("loops.ll", row=row(made, call)), checked)


def entry(signature: Signature, group: str, checked: bool, first: str = "") -> str:
    """The entry, whose loop over groups does `group` for each; `first` is done once for a run of them."""
    begin = [pointers(signature), *([checks.READ] if checked else []), *([first] if first else [])]
    return assembly("entry.ll", pointers="\n".join(begin), group=group) + "\n"


# What a thread's attribute is made of: a name for each dimension, of the values that the entry has at hand.
_VECTORS = {
    "thread_position_in_grid": "pos",
    "thread_position_in_threadgroup": "lid",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "size",
    "dispatch_threads_per_threadgroup": "full",
    "threads_per_grid": "threads",
    "threadgroups_per_grid": "groups",
}
_SCALARS = {
    "thread_index_in_threadgroup": "%linear",
    "thread_index_in_simdgroup": "%lane",
    "thread_index_in_quadgroup": "%quad.lane",
    "quadgroup_index_in_threadgroup": "%quadgroup",
    "simdgroup_index_in_threadgroup": "%simdgroup",
    "threads_per_simdgroup": "32",
    "thread_execution_width": "32",
    "dispatch_simdgroups_per_threadgroup": "%full.simdgroups",
    "quadgroups_per_threadgroup": "%quadgroups",
    "dispatch_quadgroups_per_threadgroup": "%full.quadgroups",
    "simdgroups_per_threadgroup": "%simdgroups",
}
# What differs between the threads of a threadgroup.
_OWN = {each for each in (*_VECTORS, *_SCALARS) if each.startswith("thread_position_") or "_index_in_" in each}
_LLVM = {"uint": "i32", "int": "i32", "ushort": "i16", "short": "i16"}


def pointers(signature: Signature) -> str:
    """The instructions that read every buffer's address, once for a run of groups."""
    lines = []
    for each in signature.bindings:
        slot = each.location + (LOCATIONS if each.space == THREADGROUP else 0)
        lines.append(f"  %at{each.parameter} = getelementptr i64, ptr %args, i64 {slot}")
        if each.space == THREADGROUP:
            lines.append(f"  %offset{each.parameter} = load i64, ptr %at{each.parameter}")
            offset = f"i64 %offset{each.parameter}"
            lines.append(f"  %arg{each.parameter} = getelementptr i8, ptr addrspace(3) %shared, {offset}")
        else:
            lines.append(f"  %plain{each.parameter} = load ptr, ptr %at{each.parameter}")
            lines.append(
                f"  %arg{each.parameter} = addrspacecast ptr %plain{each.parameter} to ptr addrspace({each.space})"
            )
    return "\n".join(lines)


def uniform(signature: Signature) -> frozenset[str]:
    """The parameters ("%3") that are the same for all threads of a threadgroup: what is no thread's own."""
    given = [each.parameter for each in signature.bindings]
    given += [each.parameter for each in signature.attributes if each.name not in _OWN]
    return frozenset(f"%{parameter}" for parameter in given)


def values(signature: Signature) -> str:
    """The instructions that make a thread's attributes of %posx, %lidx, …, %linear, %lane and %simdgroup."""
    return "\n".join(line for each in signature.attributes for line in _attribute(signature, each))


def arguments(signature: Signature, checked: bool = False) -> str:
    """The list of arguments of a call of @kernel, in its parameters' order."""
    typed = {each.parameter: f"ptr addrspace({each.space}) %arg{each.parameter}" for each in signature.bindings}
    typed |= {each.parameter: f"{llvm_type(each)} %arg{each.parameter}" for each in signature.attributes}
    return (checks.PASSED if checked else "") + ", ".join(typed[parameter] for parameter in sorted(typed))


def llvm_type(attribute: Attribute) -> str:
    """LLVM's type of a thread attribute: i32 for `uint`, <3 x i32> for `uint3`, i16 for `ushort`."""
    element = _LLVM[re.sub(r"\d$", "", attribute.type)]
    return element if attribute.width == 1 else f"<{attribute.width} x {element}>"


def _attribute(signature: Signature, attribute: Attribute) -> list[str]:
    result, kind = f"%arg{attribute.parameter}", llvm_type(attribute)
    if attribute.name in _VECTORS:
        parts = [f"%{_VECTORS[attribute.name]}{axis}" for axis in "xyz"[: attribute.width]]
    elif attribute.name in _SCALARS:
        parts = [_SCALARS[attribute.name]]
    else:
        raise RunError(f"the kernel {signature.name} asks for [[{attribute.name}]], which hf_mps does not know")
    lines, narrow = [], kind.endswith(("i16", "i16>"))
    if narrow:
        lines = [f"  {result}.n{at} = trunc i32 {part} to i16" for at, part in enumerate(parts)]
        parts = [f"{result}.n{at}" for at in range(len(parts))]
    element = "i16" if narrow else "i32"
    if attribute.width == 1:
        return [*lines, f"  {result} = add {element} {parts[0]}, 0"]
    vector = "poison"
    for at, part in enumerate(parts):
        named = result if at == len(parts) - 1 else f"{result}.v{at}"
        lines.append(f"  {named} = insertelement {kind} {vector}, {element} {part}, i32 {at}")
        vector = named
    return lines
