"""bfloat arithmetic by float arithmetic and integer rounding: the same on every host, and vectorised.

LLVM rounds a float to bfloat by the instruction of AVX512-BF16, which turns subnormals into zero, or, on hosts
without it, by a call of __truncsfbf2 for each element. `explicit` puts these definitions in the place of a kernel's
own bfloat arithmetic. One operation in float, rounded again to bfloat, comes out as if rounded once (24 bits are over
2 * 8 + 2).
"""

import re

from hf_mps.metal.kernels.intrinsics.body import Body, Value
from hf_mps.metal.kernels.intrinsics.definition import Definition, llvm_type, scalar_of

_NAME = re.compile(r"hf\.bfloat\.(?:(v\d+)?f32|(add|sub|mul|div|fmuladd)|cmp\.([a-z]+))")
_FLAGS = r"(?:(?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast) )*"
_ROUNDING = re.compile(rf"= fptrunc {_FLAGS}float (\S+) to bfloat")
_ARITHMETIC = re.compile(rf"= f(add|sub|mul|div) {_FLAGS}bfloat (\S+), (\S+?)(?=,|\s|$)")
# LLVM 22 aborts on x86 where a comparison of bfloats meets another with zero ("Shift operators return type …").
_COMPARISON = re.compile(rf"= fcmp {_FLAGS}([a-z]+) bfloat (\S+), (\S+?)(?=,|\s|$)")
_FUSED = re.compile(rf"= (?:tail |notail |musttail )?call {_FLAGS}bfloat @llvm\.fmuladd\.bf16\(")


def define(name: str) -> Definition | None:
    """The helper that rounds floats (hf.bfloat.f32, or with a vector's v4f32), or one for an operation on bfloats."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    if found[3]:
        return _comparison(name, found[3])
    return _arithmetic(name, found[2]) if found[2] else _rounding(name, llvm_type(f"{found[1] or ''}f32"))


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


def _rounding(name: str, kind: str) -> Definition:
    body = Body(name, kind.replace("float", "bfloat"), kind)
    return body.finish(nearest(body.arguments[0]))


def _comparison(name: str, predicate: str) -> Definition:
    body = Body(name, "i1", "bfloat", "bfloat")
    a, b = (widened(x) for x in body.arguments)
    return body.finish(a.compare(predicate, b))


def _arithmetic(name: str, operation: str) -> Definition:
    body = Body(name, "bfloat", *["bfloat"] * (3 if operation == "fmuladd" else 2))
    a, b, *c = (widened(x) for x in body.arguments)
    if c:
        return body.finish(rounded(body.fma(a, b, c[0])))
    return body.finish(
        rounded({"add": a.__add__, "sub": a.__sub__, "mul": a.__mul__, "div": a.__truediv__}[operation](b))
    )
