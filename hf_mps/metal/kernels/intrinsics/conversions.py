"""air.convert between integers, half, bfloat and float, and bfloat arithmetic by float arithmetic.

Metal (Metal Shading Language specification, conversion rules): to an integer, round toward zero, NaN gives 0. A value
outside of the integer's range is undefined there; Apple's GPUs saturate at every width (pytorch#169058: 128.0 to int8
is 127; mlx#4038), and so do these. To bool: whether it is not zero. To floating point, round to nearest, ties to
even; subnormals are kept, half overflows to infinity. An integer becomes a bfloat through float, as it does in
PyTorch on the CPU.

LLVM rounds a float to bfloat by the instruction of AVX512-BF16, which turns subnormals into zero, or, on hosts
without it, by a call of __truncsfbf2 for each element. `explicit` puts these definitions in the place of a kernel's
own bfloat arithmetic. One operation in float, rounded again to bfloat, comes out as if rounded once (24 bits are over
2 * 8 + 2). RUNTIME has the functions of compiler-rt that LLVM calls for half and bfloat on hosts without F16C or
AVX512-BF16: the process that compiles a kernel need not hold them, so a module carries its own, weak and named as LLVM
names them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from hf_mps.metal.kernels.intrinsics.body import TYPE, Body, Definition, Value, bits_of, llvm_type, scalar_of

_BFLOAT = re.compile(r"hf\.bfloat\.(?:(v\d+)?f32|(add|sub|mul|div|fmuladd)|cmp\.([a-z]+))")
_FLAGS = r"(?:(?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast) )*"
_ROUNDING = re.compile(rf"= fptrunc {_FLAGS}float (\S+) to bfloat")
_ARITHMETIC = re.compile(rf"= f(add|sub|mul|div) {_FLAGS}bfloat (\S+), (\S+?)(?=,|\s|$)")
# LLVM 22 aborts on x86 where a comparison of bfloats meets another with zero ("Shift operators return type …").
_COMPARISON = re.compile(rf"= fcmp {_FLAGS}([a-z]+) bfloat (\S+), (\S+?)(?=,|\s|$)")
_FUSED = re.compile(rf"= (?:tail |notail |musttail )?call {_FLAGS}bfloat @llvm\.fmuladd\.bf16\(")


def define_bfloat(name: str) -> Definition | None:
    """The helper that rounds floats (hf.bfloat.f32, or with a vector's v4f32), or one for an operation on bfloats."""
    found = _BFLOAT.fullmatch(name)
    if not found:
        return None
    if found[3]:
        body = Body(name, "i1", "bfloat", "bfloat")
        a, b = (widened(x) for x in body.arguments)
        return body.finish(a.compare(found[3], b))
    if found[2]:
        return _arithmetic(name, found[2])
    kind = llvm_type(f"{found[1] or ''}f32")
    body = Body(name, kind.replace("float", "bfloat"), kind)
    return body.finish(nearest(body.arguments[0]))


def explicit(text: str) -> tuple[str, frozenset[str]]:
    """A kernel's IR without bfloat arithmetic of LLVM's own, and the names of the helpers that it calls now."""
    text = _ROUNDING.sub(r"= call bfloat @hf.bfloat.f32(float \1)", text)
    text = _ARITHMETIC.sub(r"= call bfloat @hf.bfloat.\1(bfloat \2, bfloat \3)", text)
    text = _FUSED.sub("= call bfloat @hf.bfloat.fmuladd(", text)
    text = _COMPARISON.sub(r"= call i1 @hf.bfloat.cmp.\1(bfloat \2, bfloat \3)", text)
    return text, frozenset(re.findall(r"call (?:bfloat|i1) @(hf\.bfloat\.[\w.]+)\(", text))


def widened(x: Value) -> Value:
    """A half or bfloat as float, exactly; a float as it is."""
    if scalar_of(x.kind) != "bfloat":
        return x.cast("fpext", "float")
    return (x.cast("bitcast", "i16").cast("zext", "i32") << 16).cast("bitcast", "float")


def rounded(x: Value) -> Value:
    """A float as bfloat: to nearest, ties to even."""
    lanes = re.match(r"<(\d+)", x.kind)
    shape = f"v{lanes[1]}" if lanes else ""
    return x.body.helper(f"hf.bfloat.{shape}f32", llvm_type(f"{shape}bf16"), x)


def nearest(x: Value) -> Value:
    """`rounded` as instructions."""
    bits = x.body.bits(x)
    number = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF).compare("ugt", 0x7F800000)
    quiet = (bits >> 16) | 0x40
    return is_nan.select(quiet, number).cast("trunc", "i16").cast("bitcast", "bfloat")


def _arithmetic(name: str, operation: str) -> Definition:
    body = Body(name, "bfloat", *["bfloat"] * (3 if operation == "fmuladd" else 2))
    a, b, *c = (widened(x) for x in body.arguments)
    if c:
        return body.finish(rounded(body.fma(a, b, c[0])))
    results = {"add": a.__add__, "sub": a.__sub__, "mul": a.__mul__, "div": a.__truediv__}
    return body.finish(rounded(results[operation](b)))


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
    if to == "i1":
        return x.compare("ne", 0) if sign_from != "f" else widened(x).compare("une", 0.0)
    if sign_from != "f":
        narrower = int(to[1:]) < bits_of(scalar_of(x.kind))
        return x.cast("trunc" if narrower else "sext" if sign_from == "s" else "zext", to)
    x = widened(x)
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


_LINKAGE = "weak"


def _half_to_float() -> Definition:
    """Shifts the half's bits into a float's place; a product by 2^112 mends the exponent, subnormals included."""
    body = Body("__extendhfsf2", "float", "half")
    bits = body.bits(body.arguments[0]).cast("zext", "i32")
    size = (bits & 0x7FFF) << 13
    scaled = body.bits(size.cast("bitcast", "float") * 2.0**112)
    special = size.compare("uge", 0x7C00 << 13)
    magnitude = special.select(size | 0x7F800000, scaled)
    return body.finish((magnitude | ((bits & 0x8000) << 16)).cast("bitcast", "float"), "nounwind", _LINKAGE)


def _float_to_half() -> Definition:
    """To nearest, ties to even: normal halves by integers, subnormal ones by adding 1/2, whose last bit is theirs."""
    body = Body("__truncsfhf2", "half", "float")
    bits = body.bits(body.arguments[0])
    size = bits & 0x7FFFFFFF
    rebased = size - (112 << 23)
    normal = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13
    small = body.bits(size.cast("bitcast", "float") + 0.5) - 0x3F000000
    result = size.compare("ult", 113 << 23).select(small, normal)
    result = size.compare("uge", 0x47800000).select(0x7C00, result)
    result = size.compare("ugt", 0x7F800000).select((size >> 13) | 0x7E00, result)
    half = ((result & 0x7FFF) | ((bits >> 16) & 0x8000)).cast("trunc", "i16")
    return body.finish(half.cast("bitcast", "half"), "nounwind", _LINKAGE)


def _float_to_bfloat() -> Definition:
    body = Body("__truncsfbf2", "bfloat", "float")
    return body.finish(nearest(body.arguments[0]), "nounwind", _LINKAGE)


_WITHOUT = {"f16c": (_half_to_float(), _float_to_half()), "avx512bf16": (_float_to_bfloat(),)}
RUNTIME = tuple(itertools.chain(*_WITHOUT.values()))


def lacking(features: Mapping[str, bool]) -> tuple[Definition, ...]:
    """The functions for a CPU with these of LLVM's features: it may have F16C and not AVX512-BF16, as AVX2 hosts do."""
    return tuple(itertools.chain(*(some for feature, some in _WITHOUT.items() if not features.get(feature, False))))
