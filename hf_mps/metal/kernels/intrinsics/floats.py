"""Functions of floats: rounding, extrema, fma, roots, remainders; exponentials, logarithms, angles, powers.

Meanings are the Metal Shading Language specification's: fmin and fmax take the other argument where one is NaN, clamp
is fmin(fmax(x, low), high), fract stays below one, subnormals are kept. sqrt and rsqrt are correctly rounded.

exp, log, pow, hyperbolic and trigonometric functions are computed in double and rounded once to float. A modest
polynomial in double is both simpler and more accurate than a careful one in float: each result is within 0.51 units in
the last place, well inside what Metal promises for precise math (2 to 16), so `fast_` names share these definitions.
exp and exp2, which training calls most, stay in float and are within one unit. No call, no branch, no table: a loop
over them is vectorised. Angles and powers, which are rarer, are the host's libm's, by LLVM's intrinsics of their names.
Subnormal arguments and results are kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from hf_mps.metal.kernels.intrinsics.body import TYPE, Body, Definition, Value, bits_of, llvm_type, scalar_of
from hf_mps.metal.kernels.intrinsics.conversions import from_double


def _read(text: str) -> tuple[float, ...]:
    return tuple(float.fromhex(word) for word in text.split())


# (2^r - 1) / r for |r| <= 1/2, relative error 2^-37
EXP2_MINUS_1 = _read("""
    0x1.62e42fef9cc69p-1 0x1.ebfbdff82a734p-3 0x1.c6b08da70cce3p-5 0x1.3b2ab70ad2565p-7
    0x1.5d877598350dep-10 0x1.4308c7183d6a2p-13 0x1.00c0e4e15189cp-16 0x1.63b2d7971923fp-20
""")
# (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, as floats: the error in e^r is 2^-32
EXP_QUADRATIC = _read("""
    0x1.0p-1 0x1.555556p-3 0x1.5554e8p-5 0x1.1110e0p-7 0x1.6d43acp-10 0x1.a1256ap-13
""")
# 2 atanh(s) / (s ln 2) in s^2, for |s| <= (sqrt 2 - 1) / (sqrt 2 + 1), relative error 2^-56
LOG2 = _read("""
    0x1.71547652b82fep+1 0x1.ec709dc3a047dp-1 0x1.2776c50ee39dcp-1 0x1.a61762d693934p-2
    0x1.484afb7a67652p-2 0x1.0ca160627dbfcp-2 0x1.c46e1440404d7p-3 0x1.b592d3c48c41cp-3
""")


_LOG2_E = 1 / math.log(2)
_ROUNDING = 1.5 * 2.0**52  # adding it rounds to an integer, which then stands in the low bits
_ROUNDING_FLOAT = 1.5 * 2.0**23
_LN2, _LN2_REST = float.fromhex("0x1.62e43p-1"), float.fromhex("0x1.05c61p-29")  # ln 2 is their difference
_HALF_ROOT = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
_ONE = 0x3FF0000000000000

_NAME = re.compile(rf"air\.(?:fast_)?(\w+)\.({TYPE})")
_PLAIN = {name: name for name in ("floor", "ceil", "trunc", "round", "fabs", "sqrt")} | {"rint": "roundeven"}
_BELOW_ONE = {"half": 1 - 2.0**-11, "float": 1 - 2.0**-24}


def define(name: str) -> Definition | None:
    """The definition of a function of floats; sincos returns the sine and stores the cosine."""
    found = _NAME.fullmatch(name)
    if not found or scalar_of(kind := llvm_type(found[2])) not in ("half", "float"):
        return None
    operation, scalar = found[1], scalar_of(kind)
    if operation in _OPERATIONS:
        write, parameters = _OPERATIONS[operation]
        kinds = [kind if p == "x" else p for p in parameters]
        if "i32" in kinds and kind.startswith("<"):
            return None
        body = Body(name, scalar if operation == "dot" else kind, *kinds)
        return body.finish(write(*body.arguments))
    if operation in ("exp", "exp2") and scalar == "float":
        body = Body(name, kind, kind)
        return body.finish(exp_in_float(body.arguments[0], natural=operation == "exp"))
    if operation == "sincos":
        body = Body(name, kind, kind, "ptr")
        x = body.arguments[0].cast("fpext", "double")
        sin, cos = (from_double(body.llvm(each, x), scalar) for each in ("sin", "cos"))
        body.effect(f"store {kind} {cos.name}, ptr {body.arguments[1].name}")
        return body.finish(sin)
    function = _IN_DOUBLE.get(operation)
    if function is None:
        return None
    body = Body(name, kind, *[kind] * function.__code__.co_argcount)
    return body.finish(from_double(function(*(a.cast("fpext", "double") for a in body.arguments)), scalar))


def bounded(x: Value, low: float, high: float) -> Value:
    """`x` kept within two limits; NaN stays."""
    x = x.compare("olt", low).select(low, x)
    return x.compare("ogt", high).select(high, x)


def exp2_split(x: Value) -> tuple[Value, Value]:
    """2^x as (power, rest): 2^x is power * (1 + rest), with rest accurate relative to itself. `x` within 1000."""
    body = x.body
    shifted = x + _ROUNDING
    r = x - (shifted - _ROUNDING)
    power = ((body.bits(shifted) << 52) + _ONE).cast("bitcast", "double")
    return power, r * body.polynomial(r, EXP2_MINUS_1)


def exp2(x: Value) -> Value:
    """2^x in double; over and under float's range where float's is."""
    power, rest = exp2_split(bounded(x, -200.0, 200.0))
    return x.body.fma(power, rest, power)


def exp_in_float(x: Value, natural: bool) -> Value:
    """e^x or 2^x of a float, in float alone: within 1 unit in the last place at twice the speed of the way by double.

    The exponent is put on in two factors, so that subnormal results and 2^128 - 2^104 come out.
    """
    body = x.body
    low, high = (-104.0, 89.0) if natural else (-150.0, 129.0)
    x = bounded(x, low, high)
    shifted = body.fma(x, _LOG2_E if natural else 1.0, _ROUNDING_FLOAT)
    whole = shifted - _ROUNDING_FLOAT
    r = body.fma(whole, _LN2_REST, body.fma(whole, -_LN2, x)) if natural else (x - whole) * math.log(2)
    e = body.fma(r * r, body.polynomial(r, EXP_QUADRATIC), r) + 1.0
    # the low bits hold the whole part plus 2^22
    exponent = (body.bits(shifted) & 0x7FFFFF) - (2**22 - 254)
    first = exponent >> 1
    return e * (first << 23).cast("bitcast", "float") * ((exponent - first) << 23).cast("bitcast", "float")


def expm1(x: Value) -> Value:
    """e^x - 1, accurate relative to itself near zero."""
    power, rest = exp2_split(bounded(x * _LOG2_E, -200.0, 200.0))
    return x.body.fma(power, rest, power - 1.0)


def log2(x: Value) -> Value:
    """The logarithm to base 2 of a positive finite double that float holds; specials follow C."""
    body = x.body
    shifted = body.bits(x) + (_ONE - _HALF_ROOT)
    # the exponent as a double without an integer conversion, which AVX2 has not for 64 bits
    exponent = ((shifted >> 52) | 0x4330000000000000).cast("bitcast", "double") - (2.0**52 + 1023)
    m = ((shifted & (2**52 - 1)) + _HALF_ROOT).cast("bitcast", "double")
    s = (m - 1.0) / (m + 1.0)
    result = body.fma(s, body.polynomial(s * s, LOG2), exponent)
    result = x.compare("oeq", math.inf).select(math.inf, result)
    result = x.compare("oeq", 0.0).select(-math.inf, result)
    return x.compare("ult", 0.0).select(math.nan, result)


def tanh(x: Value) -> Value:
    """With t = e^(2|x|) - 1: t / (t + 2), which is 1 in float from |x| = 10 on."""
    t = expm1(bounded(x.body.llvm("fabs", x) * 2.0, 0.0, 60.0))
    return copysign(t / (t + 2.0), x)


def _odd(far: Callable[[Value], Value], cubic: float, x: Value) -> Value:
    """An odd function: of a small number, where `far` would lose it in a sum with 1, the first terms of its series."""
    size = x.body.llvm("fabs", x)
    near = size + size * size * size * cubic
    return copysign(size.compare("olt", 1e-4).select(near, far(size)), x)


def _asinh(x: Value) -> Value:
    return _odd(lambda size: log2(size + x.body.llvm("sqrt", size * size + 1.0)) * math.log(2), -1 / 6, x)


def _atanh(x: Value) -> Value:
    return _odd(lambda size: log2((size + 1.0) / (x.body.value(1.0, x.kind) - size)) * (math.log(2) / 2), 1 / 3, x)


def _sinpi(x: Value) -> Value:
    """sin(pi x), of the distance to the nearest whole number, which is exact."""
    body = x.body
    whole = body.llvm("roundeven", x)
    r = x - whole
    half = whole * 0.5
    odd = body.llvm("trunc", half).compare("one", half)
    value = body.llvm("sin", r * math.pi)
    value = odd.select(-value, value)
    return r.compare("oeq", 0.0).select(copysign(body.value(0.0, x.kind), x), value)


def _cospi(x: Value) -> Value:
    """cos(pi x), the sine a quarter of a turn ahead; of x less whole turns, as a large x would lose the quarter."""
    turns = x.body.llvm("roundeven", x * 0.5) * 2.0
    return _sinpi(x - turns + 0.5)


def _llvm(name: str) -> Callable[[Value], Value]:
    return lambda x: x.body.llvm(name, x)


def _llvm_of_two(name: str) -> Callable[[Value, Value], Value]:
    return lambda x, y: x.body.llvm(name, x, y)


_IN_DOUBLE: dict[str, Callable[..., Value]] = {
    "exp": lambda x: exp2(x * _LOG2_E),
    "exp2": lambda x: exp2(x),
    "exp10": lambda x: exp2(x * math.log2(10)),
    "log": lambda x: log2(x) * math.log(2),
    "log2": lambda x: log2(x),
    "log10": lambda x: log2(x) * math.log10(2),
    "tanh": tanh,
    **{name: _llvm(name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")},
    **{name: _llvm_of_two(name) for name in ("pow", "atan2")},
    "asinh": _asinh,
    # Two roots: that of x * x - 1 is a number below -1, too.
    "acosh": lambda x: log2(x + x.body.llvm("sqrt", x - 1.0) * x.body.llvm("sqrt", x + 1.0)) * math.log(2),
    "atanh": _atanh,
    "sinpi": _sinpi,
    "cospi": _cospi,
    "tanpi": lambda x: _sinpi(x) / _cospi(x),
}


def maximum(a: Value, b: Value) -> Value:
    """The larger of two; where one is NaN, the other."""
    return a.body.llvm("maxnum", a, b)


def minimum(a: Value, b: Value) -> Value:
    """The smaller of two; where one is NaN, the other."""
    return a.body.llvm("minnum", a, b)


def copysign(magnitude: Value, sign: Value) -> Value:
    """`magnitude` with the sign of `sign`."""
    return magnitude.body.llvm("copysign", magnitude, sign)


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
    **{name: (_llvm(operation), "x") for name, operation in _PLAIN.items()},
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
