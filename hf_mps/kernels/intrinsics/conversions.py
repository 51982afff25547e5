"""air.convert: between integers, half, bfloat and float.

Metal (Metal Shading Language specification, conversion rules): to an integer, round toward zero, NaN gives 0. A value
outside of the integer's range is undefined there; Apple's GPUs saturate at every width (pytorch#169058: 128.0 to int8
is 127; mlx#4038), and so do these. To bool: whether it is not zero. To floating point, round to nearest, ties to
even; subnormals are kept, half overflows to infinity. An integer becomes a bfloat through float, as it does in
PyTorch on the CPU.
"""

import re

from hf_mps.kernels.intrinsics.body import Body, Value
from hf_mps.kernels.intrinsics.definition import TYPE, Definition, llvm_type, scalar_of

_NAME = re.compile(rf"air\.convert\.([fsu])\.({TYPE})\.([fsu])\.({TYPE})")
_BFLOAT = re.compile(r"hf\.bfloat\.(v\d+)?f32")


def define(name: str) -> Definition | None:
    """The conversion named `air.convert.TO.FROM`, or the rounding `hf.bfloat.f32`."""
    if found := _BFLOAT.fullmatch(name):
        return _round_to_bfloat(name, llvm_type(f"{found[1] or ''}f32"))
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


def widened(x: Value) -> Value:
    """A half or bfloat as float, exactly."""
    if scalar_of(x.kind) != "bfloat":
        return x.cast("fpext", "float")
    return (x.cast("bitcast", "i16").cast("zext", "i32") << 16).cast("bitcast", "float")


def narrowed(x: Value, scalar: str) -> Value:
    """A float rounded to `scalar`, to nearest, ties to even."""
    if scalar != "bfloat":
        return x.cast("fptrunc", scalar)
    lanes = re.match(r"<(\d+)", x.kind)
    shape = f"v{lanes[1]}" if lanes else ""
    return x.body.helper(f"hf.bfloat.{shape}f32", llvm_type(f"{shape}bf16"), x)


def _integer(x: Value, to: str, sign_from: str) -> Value:
    here, there = (int(kind[1:]) for kind in (scalar_of(x.kind), to))
    if to == "i1":
        return x.compare("ne", 0)
    return x.cast("trunc" if there < here else "sext" if sign_from == "s" else "zext", to)


def _round_to_bfloat(name: str, kind: str) -> Definition:
    """Rounding by integer arithmetic.

    LLVM's fptrunc calls a function for each element where the host has no AVX512-BF16, and its instruction turns
    subnormals into zero.
    """
    body = Body(name, kind.replace("float", "bfloat"), kind)
    bits = body.bits(body.arguments[0])
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF).compare("ugt", 0x7F800000)
    quiet = (bits >> 16) | 0x40
    return body.finish(is_nan.select(quiet, rounded).cast("trunc", "i16").cast("bitcast", "bfloat"))
