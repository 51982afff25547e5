"""The functions of the Metal Shading Language specification, 3.2: each of its tables' rows, for each type that it names.

A row is an expression of `a`, `b` and `c` in Metal and what numpy computes for it. One kernel for a type runs all rows
of a table on edge values: zeros, infinities, NaN, subnormals, the least and the greatest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
DTYPES = {
    "float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16, "char": torch.int8, "uchar": torch.uint8,
    "short": torch.int16, "ushort": torch.uint16, "int": torch.int32, "uint": torch.uint32, "long": torch.int64,
    "ulong": torch.uint64,
}  # fmt: skip
INTEGERS = [name for name in DTYPES if name not in ("float", "half", "bfloat")]
SHAPES = ("", "2", "3", "4")
LANES = np.arange(32)


def on_mps(values: Array, kind: str) -> Tensor:
    """The values as a tensor of Metal's type."""
    if kind in INTEGERS:
        size = np.dtype(str(DTYPES[kind]).removeprefix("torch."))
        return torch.from_numpy(np.array([int(v) for v in values.ravel()], dtype=size)).to("mps")
    return torch.from_numpy(values.astype(np.float64)).to(DTYPES[kind]).to("mps")


def on_host(values: Tensor) -> Array:
    """A tensor's numbers: float64, or Python's integers."""
    found = values.cpu()
    if found.dtype.is_floating_point:
        return found.double().numpy()
    return np.array(found.numpy().tolist(), dtype=object)


def ran(kind: str, shape: str, rows: list[str], inputs: list[Array], result: str = "") -> list[Array]:
    """Each row's results for inputs a, b, c of a type, `shape` elements at a time."""
    count, result = int(shape or 1), result or kind
    load = " ".join(
        f"{kind}{shape} {name}; for (int k = 0; k < {count}; ++k) {name}{'[k]' if shape else ''} = p{name}[i * {count} + k];"
        for name in "abc"
    )
    store = "".join(
        f"  {{ auto r = {row}; for (int k = 0; k < {count}; ++k) out[({number} * n + i) * {count} + k] = "
        f"{result}(r{'[k]' if shape else ''}); }}\n"
        for number, row in enumerate(rows)
    )
    library = torch.mps.compile_shader(f"""
        #include <metal_stdlib>
        using namespace metal;
        kernel void rows(device const {kind}* pa, device const {kind}* pb, device const {kind}* pc, device {result}* out,
                         constant int& n, uint i [[thread_position_in_grid]]) {{
          typedef {kind}{shape} V; typedef {kind} E;
          {load}
        {store}}}""")
    size = len(inputs[0])
    out = torch.zeros(len(rows) * size, dtype=DTYPES[result], device="mps")
    library.rows(*(on_mps(each, kind) for each in inputs), out, size // count, threads=size // count)
    return list(on_host(out).reshape(len(rows), size))


def float_inputs(kind: str) -> list[Array]:
    """Pairs of all edge values, and a third number beside each."""
    info = torch.finfo(DTYPES[kind])
    edges = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.7, -3.7, 0.001, 7, 100.25, -60.5, math.inf, -math.inf, math.nan]
    edges += [info.tiny, -info.tiny, info.smallest_normal / 8, -info.smallest_normal / 8, info.max, -info.max]
    values = torch.tensor(edges, dtype=torch.float64).to(DTYPES[kind]).double().numpy()
    a, b = (each.ravel() for each in np.meshgrid(values, values))
    return [a, b, np.random.default_rng(0).permutation(a)]


Row = tuple[str, Callable[..., Any], float]


def rounded(x: Array) -> Array:
    """Halfway cases away from zero."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def median(a: Array, b: Array, c: Array) -> Array:
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


# Expression, reference, and the units in the last place that it may be off; 0 compares a zero's sign too.
ONE: list[Row] = [(f"{name}(a)", getattr(np, numpy), 4) for name, numpy in {
    **{each: each for each in ("exp", "exp2", "log", "log2", "log10", "sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
}.items()]  # fmt: skip
ONE += [(f"{name}(a)", getattr(np, name), 0) for name in ("floor", "ceil", "trunc", "rint", "fabs", "sqrt")]
ONE += [
    ("abs(a)", np.abs, 0),
    ("round(a)", rounded, 0),
    ("exp10(a)", lambda a: 10.0**a, 4),
    ("rsqrt(a)", lambda a: 1 / np.sqrt(a), 4),
    ("saturate(a)", lambda a: np.fmin(np.fmax(a, 0), 1), 1),
    ("sign(a)", lambda a: np.where(np.isnan(a), 0.0, np.where(a == 0, a, np.sign(a))), 0),
    ("clamp(a, V(-1), V(2))", lambda a: np.fmin(np.fmax(a, -1), 2), 1),
    ("fma(a, a, a)", lambda a: a * a + a, 1),
    ("mix(a, V(2), V(0.25))", lambda a: a + (2 - a) * 0.25, 4),
]
TWO: list[Row] = [
    ("pow(a, b)", np.power, 4),
    ("powr(fabs(a), b)", lambda a, b: np.power(np.abs(a), b), 4),
    ("atan2(a, b)", np.arctan2, 4),
    ("fmod(a, b)", np.fmod, 0),
    ("copysign(a, b)", np.copysign, 0),
    ("fdim(a, b)", lambda a, b: np.where(np.isnan(a) | np.isnan(b), math.nan, np.where(a > b, a - b, 0.0)), 1),
    ("divide(a, b)", np.divide, 1),
    ("step(a, b)", lambda a, b: np.where(b < a, 0.0, 1.0), 0),
    *((f"{name}(a, b)", np.fmin if "min" in name else np.fmax, 1) for name in ("fmin", "fmax", "min", "max")),
]
THREE: list[Row] = [
    ("fmin3(a, b, c)", lambda a, b, c: np.fmin(a, np.fmin(b, c)), 1),
    ("fmax3(a, b, c)", lambda a, b, c: np.fmax(a, np.fmax(b, c)), 1),
    ("min3(a, b, c)", lambda a, b, c: np.fmin(a, np.fmin(b, c)), 1),
    ("max3(a, b, c)", lambda a, b, c: np.fmax(a, np.fmax(b, c)), 1),
    ("fmedian3(a, b, c)", median, 1),
    ("median3(a, b, c)", median, 1),
    ("select(a, b, c > V(1))", lambda a, b, c: np.where(c > 1, b, a), 0),
]
TESTS: list[Row] = [
    ("isnan(a)", np.isnan, 0),
    ("isinf(a)", np.isinf, 0),
    ("isfinite(a)", np.isfinite, 0),
    ("signbit(a)", np.signbit, 0),
    ("isordered(a, b)", lambda a, b: ~(np.isnan(a) | np.isnan(b)), 0),
    ("isunordered(a, b)", lambda a, b: np.isnan(a) | np.isnan(b), 0),
    *((f"(a {sign} b)", compare, 0) for sign, compare in {
        "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
    }.items()),
    ("(a < b && isnan(b))", lambda a, b: np.zeros(len(a)), 0),
    ("(isinf(a) || isnan(b))", lambda a, b: np.isinf(a) | np.isnan(b), 0),
]  # fmt: skip


def arguments(function: Callable[..., Any], row: str) -> int:
    """How many of a, b, c a row takes."""
    return 3 if "c" in row.replace("select", "").split("(", 1)[1] and ", c" in row + ", c" * ("c >" in row) else (
        2 if " b" in row or "(b" in row or ", b" in row else 1)  # fmt: skip


def last_place(expected: Array, kind: str) -> Array:
    """The distance to the next number of a type at each of these."""
    info = torch.finfo(DTYPES[kind])
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(expected)))
    return np.exp2(np.where(np.isfinite(exponent), np.maximum(exponent, math.log2(info.smallest_normal)),
                            math.log2(info.smallest_normal))) * info.eps  # fmt: skip


def wrong(row: str, found: Array, expected: Array, kind: str, units: float) -> str | None:
    """What is wrong with a row's results."""
    exact = torch.from_numpy(np.asarray(expected, dtype=np.float64)).to(DTYPES[kind]).double().numpy()
    with np.errstate(all="ignore"):
        near = np.abs(found - exact) <= max(units, 0.5) * last_place(exact, kind)
    # At the end of the range the last place decides whether it is infinite.
    near |= (np.abs(exact) >= torch.finfo(DTYPES[kind]).max) & (np.abs(found) >= torch.finfo(DTYPES[kind]).max) & (
        np.sign(found) == np.sign(exact))  # fmt: skip
    right = (found == exact) | (np.isnan(found) & np.isnan(exact)) | (near & (units > 0))
    if units == 0:
        right &= (np.signbit(found) == np.signbit(exact)) | np.isnan(exact)
    if right.all():
        return None
    at = int(np.argmin(right))
    return f"{row}: {found[at]} for {exact[at]} at {at}, {int((~right).sum())} in all"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float", "half"])
def test_common_math_and_relational_functions(kind: str, shape: str) -> None:
    inputs = float_inputs(kind)
    inputs = [each[: len(each) // 12 * 12] for each in inputs]
    problems = []
    with np.errstate(all="ignore"):
        for rows, given in ((ONE, 1), (TWO, 2), (THREE, 3)):
            found = ran(kind, shape, [row for row, _, _ in rows], inputs)
            for (row, function, units), each in zip(rows, found, strict=True):
                problems.append(wrong(row, each, function(*inputs[:given]), kind, units))
        found = ran(kind, shape, [row for row, _, _ in TESTS], inputs, "int")
        for (row, function, _), each in zip(TESTS, found, strict=True):
            expected = function(*inputs[: 2 if "b" in row.split("(", 1)[1].replace("signbit", "") else 1])
            if each.tolist() != expected.astype(int).tolist():
                problems.append(f"{row}: {each.tolist()[:20]}")
    assert [each for each in problems if each] == []
