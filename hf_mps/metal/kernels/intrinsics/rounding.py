"""Float arithmetic without a polynomial: rounding, extrema, fma, dot, roots, remainders, steps to a neighbour.

Meanings are the Metal Shading Language specification's: fmin and fmax take the other argument where one is NaN, clamp
is fmin(fmax(x, low), high), fract stays below one, subnormals are kept. sqrt and rsqrt are correctly rounded.
"""

import re
from collections.abc import Callable

from hf_mps.metal.kernels.intrinsics.body import TYPE, Body, Definition, Value, bits_of, llvm_type, scalar_of
from hf_mps.metal.kernels.intrinsics.conversions import from_double

_NAME = re.compile(rf"air\.(?:fast_)?(\w+)\.({TYPE})")
_PLAIN = {name: name for name in ("floor", "ceil", "trunc", "round", "fabs", "sqrt")} | {"rint": "roundeven"}
_BELOW_ONE = {"half": 1 - 2.0**-11, "float": 1 - 2.0**-24}


def define(name: str) -> Definition | None:
    """The definition of a rounding or arithmetic intrinsic."""
    found = _NAME.fullmatch(name)
    if not found or scalar_of(llvm_type(found[2])) not in ("half", "float"):
        return None
    operation, kind = found[1], llvm_type(found[2])
    if operation in ("all", "any") or operation not in _OPERATIONS:
        return None
    write, parameters = _OPERATIONS[operation]
    kinds = [kind if p == "x" else p for p in parameters]
    if "i32" in kinds and kind.startswith("<"):
        return None
    body = Body(name, scalar_of(kind) if operation == "dot" else kind, *kinds)
    return body.finish(write(*body.arguments))


def maximum(a: Value, b: Value) -> Value:
    """The larger of two; where one is NaN, the other."""
    return a.body.llvm("maxnum", a, b)


def minimum(a: Value, b: Value) -> Value:
    """The smaller of two; where one is NaN, the other."""
    return a.body.llvm("minnum", a, b)


def copysign(magnitude: Value, sign: Value) -> Value:
    """`magnitude` with the sign of `sign`."""
    return magnitude.body.llvm("copysign", magnitude, sign)


def _plain(operation: str) -> Callable[..., Value]:
    return lambda x: x.body.llvm(operation, x)


def _fract(x: Value) -> Value:
    rest = x - x.body.llvm("floor", x)
    top = _BELOW_ONE[scalar_of(x.kind)]
    return rest.compare("ogt", top).select(top, rest)


def _rsqrt(x: Value) -> Value:
    wide = x.cast("fpext", "double")
    return from_double(1.0 / x.body.llvm("sqrt", wide), scalar_of(x.kind))


def _fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once; of halves it is formed in double."""
    scalar = scalar_of(a.kind)
    if scalar == "float":
        return a.body.fma(a, b, c)
    return from_double(a.body.fma(*(v.cast("fpext", "double") for v in (a, b, c))), scalar)


def _dot(a: Value, b: Value) -> Value:
    """The products summed in order, each rounded into a float."""
    body, scalar = a.body, scalar_of(a.kind)
    count = int(a.kind[1:].split(" ")[0])
    a, b = a.cast("fpext", "float"), b.cast("fpext", "float")
    total = body.value(0.0, "float")
    for i in range(count):
        left, right = (body.emit("float", f"extractelement {v.kind} {v.name}, i32 {i}") for v in (a, b))
        total = left * right if not i else body.fma(left, right, total)
    return total.cast("fptrunc", scalar)


def _nextafter(x: Value, toward: Value) -> Value:
    """The neighbour of x in the direction of `toward`; equal arguments give `toward`, NaN gives NaN."""
    body, scalar = x.body, scalar_of(x.kind)
    width = bits_of(scalar)
    bits = body.bits(x)
    ahead = x.compare("olt", toward)
    outward = ahead.cast("zext", f"i{width}").compare("eq", (bits >> (width - 1)) ^ 1)
    stepped = outward.select(bits + 1, bits - 1)
    smallest = (body.bits(toward) & (1 << (width - 1))) | 1
    moved = x.compare("oeq", 0.0).select(smallest, stepped).cast("bitcast", scalar)
    kept = x.compare("oeq", toward).select(toward, moved)
    return x.compare("uno", toward).select(x + toward, kept)


_OPERATIONS: dict[str, tuple[Callable[..., Value], str | tuple[str, ...]]] = {
    **{name: (_plain(operation), "x") for name, operation in _PLAIN.items()},
    "fmin": (minimum, "xx"),
    "fmax": (maximum, "xx"),
    "clamp": (lambda x, low, high: minimum(maximum(x, low), high), "xxx"),
    "fma": (_fma, "xxx"),
    "copysign": (copysign, "xx"),
    "fract": (_fract, "x"),
    "rsqrt": (_rsqrt, "x"),
    "dot": (_dot, "xx"),
    # LLVM puts the second overload, i32, into the name itself.
    "ldexp": (lambda x, exponent: x.body.llvm("ldexp", x, exponent), ("x", "i32")),
    "fmod": (lambda x, y: x.body.emit(x.kind, f"frem {x.kind} {x.name}, {y.name}"), "xx"),
    "nextafter": (_nextafter, "xx"),
}
