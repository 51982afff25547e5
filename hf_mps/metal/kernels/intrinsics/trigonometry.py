"""Sine, cosine, tangent and their inverses: straight-line double arithmetic, rounded once to float.

As in exponentials: within 0.51 units in the last place, no call, no branch, no table. Angles are reduced by multiples
of pi/2: with fused steps in two parts up to 2^28, beyond by the bits of 2/pi that matter (Payne and Hanek, 1983).
"""

import math
import re
from collections.abc import Callable

from hf_mps.metal.kernels.intrinsics.body import Body, Value
from hf_mps.metal.kernels.intrinsics.coefficients import ASIN, ATAN, COS, SIN, SINPI, TWO_OVER_PI
from hf_mps.metal.kernels.intrinsics.conversions import from_double
from hf_mps.metal.kernels.intrinsics.definition import TYPE, Definition, llvm_type, scalar_of
from hf_mps.metal.kernels.intrinsics.exponentials import rounded_once
from hf_mps.metal.kernels.intrinsics.rounding import copysign

_HALF_PI, _HALF_PI_REST = math.pi / 2, 6.123233995736766e-17
_ROUNDING = 1.5 * 2.0**52

_NAME = re.compile(rf"air\.(?:fast_)?(\w+)\.({TYPE})")


def define(name: str) -> Definition | None:
    """The definition of a trigonometric function; sincos returns the sine and stores the cosine."""
    found = _NAME.fullmatch(name)
    if not found or scalar_of(kind := llvm_type(found[2])) not in ("half", "float"):
        return None
    if found[1] == "sincos":
        body = Body(name, kind, kind, "ptr")
        pair = sine_and_cosine(body.arguments[0].cast("fpext", "double"))
        sin, cos = (from_double(v, scalar_of(kind)) for v in pair)
        body.effect(f"store {kind} {cos.name}, ptr {body.arguments[1].name}")
        return body.finish(sin)
    return rounded_once(name, kind, _FUNCTIONS[found[1]]) if found[1] in _FUNCTIONS else None


def sine_and_cosine(x: Value) -> tuple[Value, Value]:
    """Both, in double, of a double that float holds."""
    body = x.body
    r, quadrant = _reduced(x)
    z = r * r
    sin, cos = r * body.polynomial(z, SIN), body.polynomial(z, COS)
    swapped = (quadrant & 1).compare("ne", 0)
    s, c = swapped.select(cos, sin), swapped.select(sin, cos)
    return _negated(s, quadrant & 2), _negated(c, (quadrant + 1) & 2)


def _reduced(x: Value) -> tuple[Value, Value]:
    """(r, n) with x = r + n pi/2 and |r| <= pi/4; of n the last two bits count."""
    body = x.body
    shifted = body.fma(x, 2 / math.pi, _ROUNDING)
    turns = shifted - _ROUNDING
    r = body.fma(turns, -_HALF_PI_REST, body.fma(turns, -_HALF_PI, x))
    large_r, large_n = _reduced_by_bits(x)
    is_large = body.llvm("fabs", x).compare("oge", 2.0**28)
    # x - x is NaN for an infinite x, and 0 otherwise
    return is_large.select(large_r + (x - x), r), is_large.select(large_n, body.bits(shifted))


def _reduced_by_bits(x: Value) -> tuple[Value, Value]:
    """`_reduced` for |x| = m 2^t with a whole m below 2^24 and 0 <= t <= 104.

    x 2/pi is needed modulo 4: m times the 96 bits of 2/pi that begin at bit t, as a number in units of 2^-62.
    """
    body = x.body
    bits = body.bits(x)
    mantissa = ((bits >> 29) & (2**23 - 1)) | 2**23
    t = ((bits >> 52) & 0x7FF) - (1023 + 23)
    later = t.compare("uge", 64)
    words = [body.value(word, t.kind) for word in TWO_OVER_PI]
    first, second, third = (later.select(words[i + 1], words[i]) for i in range(3))
    high, low = body.llvm("fshl", first, second, t), body.llvm("fshl", second, third, t)
    p = mantissa * (high & 0xFFFFFFFF) + ((mantissa * (high >> 32)) << 32) + ((mantissa * (low >> 32)) >> 32)
    n = (p + 2**61) >> 62
    # the fraction, signed, as two halves that become doubles without an integer conversion
    fraction = (p << 2) ^ 2**63
    upper = ((fraction >> 32) | 0x4330000000000000).cast("bitcast", "double") - (2.0**52 + 2.0**31)
    lower = ((fraction & 0xFFFFFFFF) | 0x4330000000000000).cast("bitcast", "double") - 2.0**52
    r = body.fma(lower, 2.0**-32, upper) * (2.0**-32 * math.pi / 2)
    negative = x.compare("olt", 0.0)
    return negative.select(-r, r), negative.select(4 - n, n)


def _negated(x: Value, second_bit: Value) -> Value:
    """`x` with its sign turned where bit 1 is set."""
    return (x.body.bits(x) ^ (second_bit << 62)).cast("bitcast", "double")


def _tan(x: Value) -> Value:
    sin, cos = sine_and_cosine(x)
    return sin / cos


def _sinpi(x: Value) -> Value:
    """sin(pi x): of the distance to the nearest whole number, which is exact."""
    body = x.body
    whole = body.llvm("roundeven", x)
    r = x - whole
    half = whole * 0.5
    odd = body.llvm("trunc", half).compare("one", half)
    value = r * body.polynomial(r * r, SINPI)
    value = odd.select(-value, value)
    return r.compare("oeq", 0.0).select(copysign(body.value(0.0, x.kind), x), value)


def atan2(y: Value, x: Value) -> Value:
    """The angle of the point (x, y), with C's special values."""
    body = x.body
    height, width = body.llvm("fabs", y), body.llvm("fabs", x)
    both = height.compare("oeq", math.inf) & width.compare("oeq", math.inf)
    height, width = both.select(1.0, height), both.select(1.0, width)
    steep = height.compare("ogt", width * math.tan(3 * math.pi / 8))
    middle = height.compare("ogt", width * math.tan(math.pi / 8))
    above = steep.select(-width, middle.select(height - width, height))
    below = steep.select(height, middle.select(height + width, width))
    offset = steep.select(math.pi / 2, middle.select(body.value(math.pi / 4, x.kind), 0.0))
    origin = above.compare("oeq", 0.0) & below.compare("oeq", 0.0)
    t = origin.select(0.0, above / below)
    angle = body.fma(t, body.polynomial(t * t, ATAN), offset)
    is_left = (body.bits(x) >> 63).compare("ne", 0)
    return copysign(is_left.select(math.pi - angle, angle), y)


def _arc(x: Value) -> tuple[Value, Value]:
    """(whether |x| is over one half, asin of |x| or of sqrt((1 - |x|) / 2))."""
    body = x.body
    size = body.llvm("fabs", x)
    large = size.compare("ogt", 0.5)
    z = large.select((1.0 - size) * 0.5, size * size)
    s = large.select(body.llvm("sqrt", z), size)
    return large, s * body.polynomial(z, ASIN)


def _asin(x: Value) -> Value:
    large, arc = _arc(x)
    return copysign(large.select(math.pi / 2 - arc * 2.0, arc), x)


def _acos(x: Value) -> Value:
    large, arc = _arc(x)
    is_left = x.compare("olt", 0.0)
    outer = is_left.select(math.pi - arc * 2.0, arc * 2.0)
    return large.select(outer, math.pi / 2 - copysign(arc, x))


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "sin": lambda x: sine_and_cosine(x)[0],
    "cos": lambda x: sine_and_cosine(x)[1],
    "tan": _tan,
    "sinpi": _sinpi,
    "atan": lambda x: atan2(x, x.body.value(1.0, x.kind)),
    "atan2": atan2,
    "asin": _asin,
    "acos": _acos,
}
