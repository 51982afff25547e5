"""The values of a kernel's parameters for one thread, as LLVM assembly: buffers, threadgroup memory, positions."""

from __future__ import annotations

import re

from hf_mps.core.errors import RunError
from hf_mps.metal.kernels.signature import THREADGROUP, Attribute, Signature

LOCATIONS = 32
"""Buffers are bound at 0 to 30 (Metal's limit is 31); offsets of threadgroup memory follow at LOCATIONS + location."""

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
    "simdgroup_index_in_threadgroup": "%simdgroup",
    "threads_per_simdgroup": "32",
    "simdgroups_per_threadgroup": "%simdgroups",
}
_OWN = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
}
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


def common(signature: Signature) -> str:
    """The instructions that make the attributes that a group's threads share; those of a thread's own are poison."""
    lines = []
    for each in signature.attributes:
        own = f"  %arg{each.parameter} = freeze {llvm_type(each)} poison"
        lines += [own] if each.name in _OWN else _attribute(signature, each)
    return "\n".join(lines)


def arguments(signature: Signature) -> str:
    """The list of arguments of a call of @kernel, in its parameters' order."""
    typed = {each.parameter: f"ptr addrspace({each.space}) %arg{each.parameter}" for each in signature.bindings}
    typed |= {each.parameter: f"{llvm_type(each)} %arg{each.parameter}" for each in signature.attributes}
    return ", ".join(typed[parameter] for parameter in sorted(typed))


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
