"""Integer intrinsics, atomic operations, and the few that tell something of a vector or of the machine.

PyTorch's kernels ask for relaxed order throughout (the order argument is 0) and Metal has no other on atomics, so
LLVM's `monotonic` serves. Their last arguments (order, scope, whether volatile) carry no meaning here. A weak
compare-and-exchange returns what memory held and writes that into `expected` where the exchange did not happen; ours
never fails without a reason, which "weak" allows.
"""

from __future__ import annotations

import re

from hf_mps.metal.kernels.intrinsics.body import TYPE, Body, Definition, bits_of, bytes_of, llvm_type, scalar_of

SIMDGROUP = 32
_EXTREMA = re.compile(rf"air\.(min|max|clamp|abs)\.([su])\.({TYPE})")
_UNIFORM = re.compile(rf"air\.is_uniform\.({TYPE})")
_LOGICAL = re.compile(r"air\.(all|any)\.(v\d+i1)")


def define(name: str) -> Definition | None:
    """min, max, clamp and abs of integers; all and any of a vector of bools; the simdgroup's width; two for kernels'
    authors: that a value is the same for all threads, which they promise, and a function constant as a condition.
    """
    if found := _UNIFORM.fullmatch(name):
        body = Body(name, "i1", llvm_type(found[1]))
        return body.finish(body.flag(True))
    if name == "air.normalize_function_constant_predicate.i8":
        body = Body(name, "i8", "i8")
        return body.finish(body.llvm("umin", body.arguments[0], body.value(1, "i8")))
    if name == "air.get_simdgroup_size.i16":
        body = Body(name, "i16")
        return body.finish(body.value(SIMDGROUP, "i16"))
    if found := _LOGICAL.fullmatch(name):
        body = Body(name, "i1", llvm_type(found[2]))
        operation = "vector.reduce.and" if found[1] == "all" else "vector.reduce.or"
        return body.finish(body.reduce(operation, body.arguments[0]))
    found = _EXTREMA.fullmatch(name)
    if not found or not scalar_of(llvm_type(found[3])).startswith("i"):
        return None
    operation, sign, kind = found[1], found[2], llvm_type(found[3])
    body = Body(name, kind, *[kind] * {"clamp": 3, "abs": 1}.get(operation, 2))
    x, *rest = body.arguments
    if operation == "clamp":
        return body.finish(body.llvm(f"{sign}min", body.llvm(f"{sign}max", x, rest[0]), rest[1]))
    if operation == "abs":
        # the lowest number has no positive counterpart and stays, as in two's complement
        return body.finish(body.llvm("abs", x, body.flag(False)) if sign == "s" else x)
    return body.finish(body.llvm(sign + operation, x, *rest))


_ATOMIC = re.compile(
    r"air\.atomic\.(global|local)\.(?:(load|store|xchg|cmpxchg\.weak)\.(i8|i32|f32)|(add|sub|min|max|and|or|xor)\.([su])\.(i32)"
    r"|(add|sub)\.(f32)|(min|max)\.(u)\.(i64))"
)
_SPACES = {"global": "ptr addrspace(1)", "local": "ptr addrspace(3)"}
_OPTIONS = ("i32", "i32", "i1")


def define_atomic(name: str) -> Definition | None:
    """The definition of an atomic intrinsic."""
    found = _ATOMIC.fullmatch(name)
    if not found:
        return None
    memory, *parts = (part for part in found.groups() if part)
    verb, suffix = parts[0], parts[-1]
    kind, pointer = llvm_type(suffix), _SPACES[memory]
    if verb == "load":
        body = Body(name, kind, pointer, *_OPTIONS)
        return body.finish(body.emit(kind, f"load atomic {kind}, {pointer} %a0 monotonic, align {bytes_of(kind)}"))
    if verb == "store":
        body = Body(name, "void", pointer, kind, *_OPTIONS)
        body.effect(f"store atomic {kind} %a1, {pointer} %a0 monotonic, align {bytes_of(kind)}")
        return body.finish()
    if verb == "cmpxchg.weak":
        return _compare_exchange(name, kind, pointer)
    # on 64 bits Metal has min and max alone, which return nothing
    body = Body(name, "void" if suffix == "i64" else kind, pointer, kind, *_OPTIONS)
    if "f32" in parts[1:] and verb != "xchg":
        verb = f"f{verb}"
    elif parts[1] == "u" and verb in ("min", "max"):
        verb = f"u{verb}"
    old = body.emit(kind, f"atomicrmw {verb} {pointer} %a0, {kind} %a1 monotonic, align {bytes_of(kind)}")
    return body.finish(None if suffix == "i64" else old)


def _compare_exchange(name: str, kind: str, pointer: str) -> Definition:
    """Compares bits, as hardware does: a NaN equals itself, and -0.0 differs from 0.0."""
    body = Body(name, kind, pointer, "ptr", kind, "i32", *_OPTIONS)
    bits = f"i{bits_of(kind)}"
    wanted = body.emit(bits, f"load {bits}, ptr %a1")
    desired = body.arguments[2].cast("bitcast", bits)
    pair = body.emit(
        f"{{ {bits}, i1 }}", f"cmpxchg {pointer} %a0, {bits} {wanted.name}, {bits} {desired.name} monotonic monotonic"
    )
    old = body.emit(bits, f"extractvalue {pair.kind} {pair.name}, 0")
    # where the exchange happened, `old` is what `expected` holds already
    body.effect(f"store {bits} {old.name}, ptr %a1")
    return body.finish(old.cast("bitcast", kind))
