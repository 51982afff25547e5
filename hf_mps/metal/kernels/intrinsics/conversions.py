"""air.convert: between integers, half, bfloat and float.

Metal (Metal Shading Language specification, conversion rules): to an integer, round toward zero, NaN gives 0. A value
outside of the integer's range is undefined there; Apple's GPUs saturate at every width (pytorch#169058: 128.0 to int8
is 127; mlx#4038), and so do these. To bool: whether it is not zero. To floating point, round to nearest, ties to
even; subnormals are kept, half overflows to infinity. An integer becomes a bfloat through float, as it does in
PyTorch on the CPU.
"""

import re

from hf_mps.metal.kernels.intrinsics.bfloat import rounded, widened
from hf_mps.metal.kernels.intrinsics.body import Body, Value
from hf_mps.metal.kernels.intrinsics.definition import TYPE, Definition, llvm_type, scalar_of

_NAME = re.compile(rf"air\.convert\.([fsu])\.({TYPE})\.([fsu])\.({TYPE})")


def define(name: str) -> Definition | None:
    """The conversion named `air.convert.TO.FROM`."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    sign_to, to, sign_from, given = found.groups()
    kind = llvm_type(to)
    body = Body(name, kind, llvm_type(given))
    return body.finish(convert(body.arguments[0], kind, sign_to, sign_from))


def convert(x: Value, kind: str, sign_to: str, sign_from: str) -> Value:
    """`x` as the type `kind`; the signs are Apple's: f, s or u."""
    to = scalar_of(kind)
    if (sign_to, sign_from) == ("f", "f"):
        return narrowed(widened(x), to)
    if sign_to == "f":
        return narrowed(x.cast("sitofp" if sign_from == "s" else "uitofp", "float"), to)
    if sign_from != "f":
        return _integer(x, to, sign_from)
    x = widened(x)
    if to == "i1":
        return x.compare("une", 0.0)
    return x.body.llvm("fptosi.sat" if sign_to == "s" else "fptoui.sat", x, returns=kind)


def narrowed(x: Value, scalar: str) -> Value:
    """A float rounded to `scalar`, to nearest, ties to even."""
    return rounded(x) if scalar == "bfloat" else x.cast("fptrunc", scalar)


def from_double(x: Value, scalar: str) -> Value:
    """A double rounded once to float or half.

    On the way to half the float in between is rounded to odd (its last bit says that something was cut off), which
    makes the second rounding come out as a single one would; LLVM's own fptrunc from double to half calls a function.
    """
    single = x.cast("fptrunc", "float")
    if scalar == "float":
        return single
    body, back = x.body, single.cast("fpext", "double")
    over = body.llvm("fabs", back).compare("ogt", body.llvm("fabs", x))
    bits = body.bits(single)
    odd = over.select(bits - 1, bits) | 1
    return back.compare("une", x).select(odd, bits).cast("bitcast", "float").cast("fptrunc", scalar)


def _integer(x: Value, to: str, sign_from: str) -> Value:
    here, there = (int(kind[1:]) for kind in (scalar_of(x.kind), to))
    if to == "i1":
        return x.compare("ne", 0)
    return x.cast("trunc" if there < here else "sext" if sign_from == "s" else "zext", to)
