"""Integer intrinsics, and the few that tell something of a vector or of the machine."""

import re

from hf_mps.metal.kernels.intrinsics.body import Body
from hf_mps.metal.kernels.intrinsics.definition import TYPE, Definition, llvm_type, scalar_of

SIMDGROUP = 32
_EXTREMA = re.compile(rf"air\.(min|max|clamp|abs)\.([su])\.({TYPE})")
_LOGICAL = re.compile(r"air\.(all|any)\.(v\d+i1)")


def define(name: str) -> Definition | None:
    """min, max, clamp and abs of integers; all and any of a vector of bools; the simdgroup's width."""
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
