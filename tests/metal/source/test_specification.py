"""The functions of the Metal Shading Language specification, 3.2: each row of its tables, for each type of the row.

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
    each = f"for (int k = 0; k < {count}; ++k)"
    part = "[k]" if shape else ""
    load = " ".join(f"{kind}{shape} {name}; {each} {name}{part} = p{name}[i * {count} + k];" for name in "abc")
    store = "".join(
        f"  {{ auto r = {row}; {each} out[({number} * n + i) * {count} + k] = {result}(r{part}); }}\n"
        for number, row in enumerate(rows)
    )
    library = torch.mps.compile_shader(f"""
        #include <metal_stdlib>
        using namespace metal;
        kernel void rows(device const {kind}* pa, device const {kind}* pb, device const {kind}* pc,
                         device {result}* out, constant int& n, uint i [[thread_position_in_grid]]) {{
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
    edges = [*(0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.7, -3.7, 0.001, 7, 100.25, -60.5)]
    edges += [math.inf, -math.inf, math.nan]
    edges += [info.tiny, -info.tiny, info.smallest_normal / 8, -info.smallest_normal / 8, info.max, -info.max]
    values = torch.tensor(edges, dtype=torch.float64).to(DTYPES[kind]).double().numpy()
    if kind == "bfloat":  # LLVM compares its subnormals as zeros on some CPUs
        values = np.where(np.abs(values) < info.smallest_normal, 0.0, values)
    a, b = (each.ravel() for each in np.meshgrid(values, values))
    return [a, b, np.random.default_rng(0).permutation(a)]


Row = tuple[str, Callable[..., Any], float]


def rounded(x: Array) -> Array:
    """Halfway cases away from zero."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def median(a: Array, b: Array, c: Array) -> Array:
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


# Expression, reference, and the units in the last place that it may be off; where they are 1, a zero's sign is open.
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
# True is 1, of a comparison of vectors too.
TESTS: dict[str, Callable[[Array, Array], Any]] = {
    "isnan(a)": lambda a, b: np.isnan(a),
    "isinf(a)": lambda a, b: np.isinf(a),
    "isfinite(a)": lambda a, b: np.isfinite(a),
    "(signbit(a) && !isnan(a))": lambda a, b: np.signbit(a) & ~np.isnan(a),
    "isordered(a, b)": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "isunordered(a, b)": lambda a, b: np.isnan(a) | np.isnan(b),
    "(a < b && isnan(b))": lambda a, b: np.zeros(len(a)),
    "(isinf(a) || isnan(b))": lambda a, b: np.isinf(a) | np.isnan(b),
    "!isnan(b)": lambda a, b: ~np.isnan(b),
    **{f"(a {sign} b)": compare for sign, compare in {
        "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
    }.items()},
}  # fmt: skip
# Of numbers that are finite and not large alone: elsewhere a result is undefined, or float64 has it wrong itself.
FINITE: list[Row] = [
    ("sinpi(a)", lambda a: np.sin(np.pi * (a % 2)), 4),
    ("cospi(a)", lambda a: np.cos(np.pi * (a % 2)), 4),
    ("tanpi(E(0.125) * a)", lambda a: np.tan(np.pi * a / 8), 8),
    ("smoothstep(V(-1), V(2), a)", lambda a: (t := np.clip((a + 1) / 3, 0, 1)) * t * (3 - 2 * t), 8),
]


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
    if units != 1:
        right &= (np.signbit(found) == np.signbit(exact)) | np.isnan(exact)
    if right.all():
        return None
    at = int(np.argmin(right))
    return f"{row}: {found[at]} for {exact[at]} at {at}, {int((~right).sum())} in all"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float", "half", "bfloat"])
def test_common_math_and_relational_functions(kind: str, shape: str) -> None:
    inputs = float_inputs(kind)
    inputs = [each[: len(each) // 12 * 12] for each in inputs]
    problems = []
    with np.errstate(all="ignore"):
        for rows, given in ((ONE, 1), (TWO, 2), (THREE, 3)):
            # There are none of bfloat, whose floats are meant: of min and max it is open which, and a NaN has no sign.
            left_out = ("min", "max", "median", "clamp", "copysign") if kind == "bfloat" else ("no function",)
            rows = [row for row in rows if not row[0].startswith(left_out)]
            found = ran(kind, shape, [row for row, _, _ in rows], inputs)
            for (row, function, units), each in zip(rows, found, strict=True):
                problems.append(wrong(row, each, function(*inputs[:given]), kind, units))
        finite = np.array(
            [*np.arange(-3, 3, 0.25), 0.3, -0.3, 0.001, -0.001, 5.9, -5.9, 0.0, -0.0, 12.75, -12.75, 31, 64]
        )
        finite = torch.from_numpy(finite).to(DTYPES[kind])
        numbers, below = finite.double().numpy(), 1 - torch.finfo(DTYPES[kind]).eps / 2 if kind != "bfloat" else 1
        rows = [*FINITE, ("fract(a)", lambda a: np.minimum(a - np.floor(a), below), 0)]
        if kind != "bfloat":  # which numpy does not know
            near = np.nextafter(finite.numpy(), finite.numpy().dtype.type(7))
            rows.append(("nextafter(a, V(7))", lambda a: near, 0))
        found = ran(kind, shape, [row for row, _, _ in rows], [numbers] * 3)
        for (row, function, units), each in zip(rows, found, strict=True):
            expected = function(numbers)
            # Near a zero of theirs the functions of half turns are as wrong as their argument.
            problems.append(wrong(row, np.where(np.abs(expected) < 1e-10, expected, each), expected, kind, units))
    assert [each for each in problems if each] == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float", "half", "bfloat"])
def test_relations(kind: str, shape: str) -> None:
    inputs = float_inputs(kind)
    info = torch.finfo(DTYPES[kind])
    rows = TESTS | {"isnormal(a)": lambda a, b: np.isfinite(a) & (np.abs(a) >= info.smallest_normal)}
    for (row, function), found in zip(rows.items(), ran(kind, shape, list(rows), inputs, "int"), strict=True):
        assert found.tolist() == function(*inputs[:2]).astype(int).tolist(), row


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float", "half"])
def test_functions_with_a_second_result_or_an_exponent(kind: str, shape: str) -> None:
    a = float_inputs(kind)[0]
    a = a[: len(a) // 12 * 12]
    split, whole, turn = f"int{shape} e; V m = frexp(a, e);", "V w; V f = modf(a, w);", "V c; V s = sincos(a, c);"
    rows = {
        f"[&]() {{ {split} return m; }}()": np.frexp(a)[0],
        f"[&]() {{ {whole} return f; }}()": np.where(np.isinf(a), np.copysign(0.0, a), np.modf(a)[0]),
        f"[&]() {{ {whole} return w; }}()": np.trunc(a),
        f"ldexp(a, int{shape}(3))": a * 8,
        f"ldexp(a, int{shape}(-5))": a / 32,
    }
    with np.errstate(all="ignore"):
        problems = [
            wrong(row, found, expected, kind, 0)
            for (row, expected), found in zip(rows.items(), ran(kind, shape, list(rows), [a] * 3), strict=True)
        ]
        turns = {f"[&]() {{ {turn} return s; }}()": np.sin(a), f"[&]() {{ {turn} return c; }}()": np.cos(a)}
        problems += [
            wrong(row, found, expected, kind, 4)
            for (row, expected), found in zip(turns.items(), ran(kind, shape, list(turns), [a] * 3), strict=True)
        ]
    assert [each for each in problems if each] == []
    exponents = [0 if v == 0 or not math.isfinite(v) else math.frexp(v)[1] for v in a]
    least, most = -(2**31), 2**31 - 1
    logs = [least if v == 0 else most if not math.isfinite(v) else math.frexp(v)[1] - 1 for v in a]
    found = ran(kind, shape, [f"[&]() {{ {split} return e; }}()", "ilogb(a)"], [a] * 3, "int")
    assert [each.tolist() for each in found] == [exponents, logs]


def bounds(kind: str) -> tuple[int, int, int]:
    """The bits, the least and the greatest number of an integer type."""
    info = torch.iinfo(DTYPES[kind])
    return info.bits, info.min, info.max


def wrapped(value: int, kind: str) -> int:
    """A number modulo two to the bits of the type, as the type has it."""
    bits, least, _ = bounds(kind)
    return (value - least) % (1 << bits) + least


def unsigned(value: int, kind: str) -> int:
    """A number's bits as a number without a sign."""
    return value % (1 << bounds(kind)[0])


def held(value: int, kind: str) -> int:
    """The nearest number that the type has."""
    _, least, most = bounds(kind)
    return min(max(value, least), most)


def turned(value: int, by: int, kind: str) -> int:
    """The bits of a number turned left."""
    bits, number = bounds(kind)[0], unsigned(value, kind)
    by %= bits
    return wrapped(number << by | number >> (bits - by), kind)


def extracted(value: int, kind: str, at: int, count: int) -> int:
    """Bits of a number, the highest of them a sign where the type has one."""
    part = unsigned(value, kind) >> at & ((1 << count) - 1)
    return part - (1 << count) if bounds(kind)[1] < 0 and part >> (count - 1) else part


# Each of the type's name and the numbers; C's own rules for << and >> of Metal: the amount modulo the width.
INTEGER: dict[str, Callable[[str, int, int, int], int]] = {
    "abs(a)": lambda t, a, b, c: wrapped(abs(a), t),
    "addsat(a, b)": lambda t, a, b, c: held(a + b, t),
    "subsat(a, b)": lambda t, a, b, c: held(a - b, t),
    "hadd(a, b)": lambda t, a, b, c: (a + b) >> 1,
    "rhadd(a, b)": lambda t, a, b, c: (a + b + 1) >> 1,
    "mulhi(a, b)": lambda t, a, b, c: a * b >> bounds(t)[0],
    "madhi(a, b, c)": lambda t, a, b, c: wrapped((a * b >> bounds(t)[0]) + c, t),
    "madsat(a, b, c)": lambda t, a, b, c: held(a * b + c, t),
    "min(a, b)": lambda t, a, b, c: min(a, b),
    "max(a, b)": lambda t, a, b, c: max(a, b),
    "min3(a, b, c)": lambda t, a, b, c: min(a, b, c),
    "max3(a, b, c)": lambda t, a, b, c: max(a, b, c),
    "median3(a, b, c)": lambda t, a, b, c: sorted((a, b, c))[1],
    "clamp(a, V(3), V(9))": lambda t, a, b, c: min(max(a, 3), 9),
    "clz(a)": lambda t, a, b, c: bounds(t)[0] - unsigned(a, t).bit_length(),
    "ctz(a)": lambda t, a, b, c: (a & -a).bit_length() - 1 if a else bounds(t)[0],
    "popcount(a)": lambda t, a, b, c: unsigned(a, t).bit_count(),
    "reverse_bits(a)": lambda t, a, b, c: wrapped(int(f"{unsigned(a, t):0{bounds(t)[0]}b}"[::-1], 2), t),
    "rotate(a, b)": lambda t, a, b, c: turned(a, b, t),
    "extract_bits(a, 2, 5)": lambda t, a, b, c: extracted(a, t, 2, 5),
    "extract_bits(a, 3, 0)": lambda t, a, b, c: 0,
    "extract_bits(a, 0, 8 * sizeof(E))": lambda t, a, b, c: a,
    "insert_bits(a, b, 2, 5)": lambda t, a, b, c: wrapped(a & ~(31 << 2) | (b & 31) << 2, t),
    "insert_bits(a, b, 2, 0)": lambda t, a, b, c: a,
    "insert_bits(a, b, 0, 8 * sizeof(E))": lambda t, a, b, c: b,
    "select(a, b, a < b)": lambda t, a, b, c: b if a < b else a,
    "a + b": lambda t, a, b, c: wrapped(a + b, t),
    "a * b": lambda t, a, b, c: wrapped(a * b, t),
}
WIDE = {
    "a << b": lambda t, a, b, c: wrapped(a << b % bounds(t)[0], t),
    "a >> b": lambda t, a, b, c: a >> b % bounds(t)[0],
    "mul24(a & V(4095), b & V(2047))": lambda t, a, b, c: (a & 4095) * (b & 2047),
    "mad24(a & V(4095), b & V(2047), c)": lambda t, a, b, c: wrapped((a & 4095) * (b & 2047) + c, t),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_functions(kind: str, shape: str) -> None:
    bits, least, most = bounds(kind)
    edges = [0, 1, 2, 3, 7, 32, 40, 100, 0x55, most, most - 1, least, least + 1]
    values = np.array([*edges, *([-1, -2, -77] if least else [77, 90, most // 2])], dtype=object)
    a, b = (each.ravel()[:252] for each in np.meshgrid(values, values))
    c = np.random.default_rng(1).permutation(a)
    rows = INTEGER | (WIDE if bits in (32, 64) else {})
    rows = {row: each for row, each in rows.items() if bits == 32 or "24" not in row}
    for (row, function), found in zip(rows.items(), ran(kind, shape, list(rows), [a, b, c]), strict=True):
        expected = [function(kind, *each) for each in zip(a, b, c, strict=True)]
        assert found.tolist() == expected, row
    difference = ran(kind, shape, ["absdiff(a, b)"], [a, b, c], kind if least == 0 else f"u{kind}")[0]
    assert difference.tolist() == [abs(x - y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("source", DTYPES)
def test_a_vector_of_another_type_is_converted(source: str, shape: str) -> None:
    values = [0, 1, 2, 100, 7, 3, 77, 5, 9, 11, 12, 64]
    if source in ("float", "half", "bfloat", "char", "short", "int", "long"):
        values = [0, -1, 2, -100, 7, 3, -77, 5, -9, 11, 12, -64]
    given = np.array(values, dtype=object)
    targets = [
        kind
        for kind in DTYPES
        if min(values) >= 0 or kind in ("float", "half", "bfloat", "char", "short", "int", "long")
    ]
    spellings = ("{}(a)", "({})a", "static_cast<{}>(a)", "[&]() {{ {} v(a); return v; }}()")
    rows = [spelling.format(f"{kind}{shape}") for spelling in spellings for kind in targets]
    for row, found in zip(rows, ran(source, shape, rows, [given] * 3, "float"), strict=True):
        assert found.tolist() == values, row


def computed(
    body: str, *inputs: Tensor, size: int = 64, kind: str = "float", threads: int = 1, head: str = ""
) -> list[Any]:
    """What a kernel writes to `out`; its inputs are p0, p1, …, its thread i."""
    names = {str(dtype): name for name, dtype in DTYPES.items()}
    given = "".join(f"device {names[str(each.dtype)]}* p{at}, " for at, each in enumerate(inputs))
    library = torch.mps.compile_shader(f"""
        #include <metal_stdlib>
        using namespace metal;
        {head}
        kernel void run({given}device {kind}* out, uint i [[thread_position_in_grid]]) {{ {body} }}""")
    out = torch.zeros(size, dtype=DTYPES[kind], device="mps")
    library.run(*(each.to("mps") for each in inputs), out, threads=threads, group_size=threads)
    return list(out.cpu().tolist())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["float", "half"])
def test_geometric_functions(kind: str, size: int) -> None:
    rng = np.random.default_rng(2)
    a, b, c = (rng.uniform(-2, 2, (8, size)).astype(np.float16).astype(np.float64) for _ in range(3))
    unit = b / np.linalg.norm(b, axis=1, keepdims=True)
    along = (a * unit).sum(1, keepdims=True)
    vectors = {
        "normalize(a)": a / np.linalg.norm(a, axis=1, keepdims=True),
        "reflect(a, b)": a - 2 * along * unit,
        "faceforward(a, b, c)": np.where((b * c).sum(1, keepdims=True) < 0, a, -a),
    }
    if size == 3:
        vectors["cross(a, b)"] = np.cross(a, b)
    scalars = {
        "dot(a, b)": (a * b).sum(1), "length(a)": np.linalg.norm(a, axis=1), "length_squared(a)": (a * a).sum(1),
        "distance(a, b)": np.linalg.norm(a - b, axis=1), "distance_squared(a, b)": ((a - b) ** 2).sum(1),
    }  # fmt: skip
    rows = [*vectors, *(f"V({row})" for row in scalars)]
    expected = [*vectors.values(), *(np.repeat(each[:, None], size, 1) for each in scalars.values())]
    allowed = {"float": 1e-5, "half": 2e-2}[kind]
    for row, found, right in zip(
        rows, ran(kind, str(size), rows, [a.ravel(), b.ravel(), c.ravel()]), expected, strict=True
    ):
        np.testing.assert_allclose(found, right.ravel(), rtol=allowed, atol=allowed, err_msg=row)
    i, n = np.array([0.6, -0.8, 0.0, 0.0])[:size], np.array([0.0, 1.0, 0.0, 0.0])[:size]
    bent, reflected = ran(kind, str(size), ["refract(a, b, E(0.5))", "refract(a, b, E(2))"], [i, n, n])
    np.testing.assert_allclose(bent, 0.5 * i - (0.5 * -0.8 + math.sqrt(1 - 0.25 * 0.36)) * n, rtol=allowed)
    assert reflected.tolist() == [0] * size


def linear(x: float) -> float:
    return x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4


@pytest.mark.parametrize("kind", ["float", "half"])
def test_packed_colours(kind: str) -> None:
    words = [0, 0x80FF017F, 0xFFFFFFFF, 0x12345678, 0x80008001, 0x7F7F0180]
    given = torch.tensor(words, dtype=torch.int64).to(torch.uint32)

    def parts(word: int, *bits: int) -> list[tuple[int, int]]:
        shifts = [sum(bits[:at]) for at in range(len(bits))]
        return [(word >> shift & ((1 << size) - 1), size) for shift, size in zip(shifts, bits, strict=True)]

    def unorm(*bits: int) -> Callable[[int], list[float]]:
        return lambda word: [part / ((1 << size) - 1) for part, size in parts(word, *bits)]

    def snorm(*bits: int) -> Callable[[int], list[float]]:
        return lambda word: [
            max((part - (part >> (size - 1) << size)) / ((1 << (size - 1)) - 1), -1.0)
            for part, size in parts(word, *bits)
        ]

    def srgb(word: int) -> list[float]:
        *colour, alpha = unorm(8, 8, 8, 8)(word)
        return [*map(linear, colour), alpha]

    formats: dict[str, tuple[str, int, Callable[[int], list[float]]]] = {
        "unorm4x8": ("unorm4x8", 4, unorm(8, 8, 8, 8)), "snorm4x8": ("snorm4x8", 4, snorm(8, 8, 8, 8)),
        "unorm4x8_srgb": ("srgb_unorm4x8", 4, srgb), "unorm2x16": ("unorm2x16", 2, unorm(16, 16)),
        "snorm2x16": ("snorm2x16", 2, snorm(16, 16)), "unorm10a2": ("unorm10a2", 4, unorm(10, 10, 10, 2)),
        "unorm565": ("unorm565", 3, unorm(5, 6, 5)),
    }  # fmt: skip
    for name, (packed, count, expected) in formats.items():
        word = "ushort(p0[i])" if count == 3 else "p0[i]"
        store = f"for (int k = 0; k < {count}; ++k) out[i * 4 + k] = v[k];"
        body = f"{kind}{count} v = unpack_{name}_to_{kind}({word}); {store}"
        found = np.array(computed(body, given, threads=len(words))).reshape(16, 4)[: len(words), :count]
        right = [expected(each & 0xFFFF if count == 3 else each) for each in words]
        np.testing.assert_allclose(found, right, rtol=1e-3 if kind == "half" else 1e-5, atol=1e-7, err_msg=name)
        if kind == "float":  # and back: a half has not the bits of 16
            back = computed(
                f"out[i] = pack_float_to_{packed}(unpack_{name}_to_float({word}));",
                given,
                kind="uint",
                threads=len(words),
            )
            packs = torch.tensor(back[: len(words)], dtype=torch.int64).to(torch.uint32)
            again = computed(body, packs, threads=len(words))
            assert np.array(again).reshape(16, 4)[: len(words), :count].tolist() == found.tolist(), name
    body = "out[0] = pack_half_to_unorm4x8(half4(2, -1, 0.5, NAN)); "
    body += "out[1] = pack_float_to_snorm4x8(float4(2, -2, 0.5, NAN));"
    assert computed(body, kind="uint", size=2) == [0x008000FF, 0x0040817F]


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_matrices(columns: int, rows: int) -> None:
    m, n = np.random.default_rng(3).integers(-4, 5, (2, columns, rows)).astype(np.float32)
    kind = f"float{columns}x{rows}"
    made = [f"{kind}({', '.join(map(str, each.ravel().tolist()))})" for each in (m, n)]
    head = f"constant {kind} fixed = {made[0]};"
    store = "{{ auto r = {}; for (int c = 0; c < {}; ++c) for (int k = 0; k < {}; ++k) out[at++] = r[c][k]; }}"
    body = f"int at = 0; {kind} m = fixed, n = {made[1]};"
    body += store.format("transpose(m)", rows, columns) + store.format("m + n * 2.0f - -m / 4.0f", columns, rows)
    body += store.format(f"transpose(m) * {kind}(half{columns}x{rows}(n))", columns, columns)
    body += f"m += n; m -= n; m *= 2.0f; out[at++] = m == {made[0]} * 2.0f && m != n;"
    expected = [*m.T.ravel(), *(m + n * 2 + m / 4).ravel(), *(n @ m.T).ravel(), 1.0]
    if columns == rows:
        body += "m *= n; out[at++] = m[1][0]; out[at++] = determinant(n);"
        expected += [(n @ (2 * m))[1, 0], np.linalg.det(n)]
    np.testing.assert_allclose(computed(body, head=head)[: len(expected)], expected, rtol=1e-5, atol=1e-5)


def lanes(group: int, function: Callable[[Array], Any]) -> Callable[[Array], Array]:
    """What a function of a group's values gives to each of its lanes."""
    return lambda x: np.concatenate([np.broadcast_to(function(part), (group,)) for part in x.reshape(-1, group)])


def moved(group: int, target: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Values from other lanes of the group; where there is none, the lane's own."""
    places = LANES % group
    others = target(places)
    inside = (others >= 0) & (others < group)
    return lambda x: np.where(inside, x[LANES - places + np.clip(others, 0, group - 1)], x)


def group_rows(group: int) -> dict[str, Callable[[Array], Array]]:
    name = {32: "simd", 4: "quad"}[group]
    rows = {
        "sum(a)": lanes(group, np.sum), "product(a)": lanes(group, np.prod), "min(a)": lanes(group, np.min),
        "max(a)": lanes(group, np.max), "prefix_inclusive_sum(a)": lanes(group, np.cumsum),
        "prefix_exclusive_sum(a)": lanes(group, lambda x: np.cumsum(x) - x),
        "prefix_inclusive_product(a)": lanes(group, np.cumprod),
        "prefix_exclusive_product(a)": lanes(group, lambda x: np.concatenate([[1], np.cumprod(x)[:-1]])),
        "shuffle(a, ushort(lane ^ 3))": moved(group, lambda at: at ^ 3),
        "shuffle_xor(a, 1)": moved(group, lambda at: at ^ 1),
        "shuffle_up(a, 1)": moved(group, lambda at: at - 1), "shuffle_down(a, 2)": moved(group, lambda at: at + 2),
        "shuffle_rotate_up(a, 1)": moved(group, lambda at: (at - 1) % group),
        "shuffle_rotate_down(a, 1)": moved(group, lambda at: (at + 1) % group),
        "broadcast(a, 3)": moved(group, lambda at: at * 0 + 3), "broadcast_first(a)": moved(group, lambda at: at * 0),
        "shuffle_and_fill_up(a, V(5), 1)": lambda x: np.where(LANES % group < 1, 5, np.roll(x, 1)),
        "shuffle_and_fill_down(a, V(5), 1)": lambda x: np.where(LANES % group == group - 1, 5, np.roll(x, -1)),
        "shuffle_and_fill_up(a, V(5), 1, 2)": lambda x: np.where(LANES % 2 < 1, 5, np.roll(x, 1)),
    }  # fmt: skip
    return {f"{name}_{row}": each for row, each in rows.items()}


@pytest.mark.parametrize("group", [32, 4])
@pytest.mark.parametrize("shape", ["", "2", "3"])
@pytest.mark.parametrize("kind", DTYPES)
def test_functions_of_a_simdgroup_and_a_quad(kind: str, shape: str, group: int) -> None:
    if group == 32 and kind in ("long", "ulong"):
        return  # no function of a simdgroup takes 64 bits
    name = {32: "simd", 4: "quad"}[group]
    values = np.array([1, 2, 1, 1, 1, 2, 1, 1] + [1] * 24)  # whose product all types have
    rows = group_rows(group)
    if kind in INTEGERS:
        rows |= {f"{name}_{row}(a)": lanes(group, each.reduce) for row, each in {
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items()}  # fmt: skip
    count = int(shape or 1)
    each_part, part = f"for (int k = 0; k < {count}; ++k)", "[k]" if shape else ""
    store = "".join(
        f"{{ auto r = {row}; {each_part} out[({at} * 32 + i) * {count} + k] = r{part}; }}\n"
        for at, row in enumerate(rows)
    )
    body = f"typedef {kind}{shape} V; uint lane = i % {group}; V a = V(p0[i]); {store}"
    found = computed(body, on_mps(values, kind), kind=kind, size=len(rows) * 32 * count, threads=32)
    for (row, function), each in zip(rows.items(), np.array(found).reshape(len(rows), 32, count), strict=True):
        assert each.tolist() == [[v] * count for v in function(values).tolist()], row


def test_votes_of_active_threads() -> None:
    body = """
        if (i % 4 != 0) {
            simd_vote s = simd_ballot(i % 2 == 0), all = simd_active_threads_mask();
            quad_vote q = quad_ballot(i % 2 == 0), active = quad_active_threads_mask();
            out[i] = uint(simd_vote::vote_t(s)); out[32 + i] = uint(ulong(all));
            out[64 + i] = uint(quad_vote::vote_t(q));
            out[96 + i] = uint(quad_vote::vote_t(active)); out[128 + i] = simd_is_first() + 2 * quad_is_first();
            out[160 + i] = s.any() + 2 * s.all() + 4 * q.any() + 8 * active.all();
            out[192 + i] = simd_broadcast_first(i); out[224 + i] = quad_broadcast_first(i);
            out[256 + i] = quad_all(i % 4 > 0) + 2 * quad_any(i == 9) + 4 * simd_all(i > 0) + 8 * simd_any(i > 31);
        }"""
    found = np.array(computed(body, kind="uint", size=288, threads=32)).reshape(9, 32)[:, LANES % 4 != 0]
    active = LANES[LANES % 4 != 0]
    even, some = (sum(1 << int(lane) for lane in active if lane % by == 0) for by in (2, 1))
    assert set(found[0]) == {even}
    assert set(found[1]) == {some}
    assert (set(found[2]), set(found[3])) == ({4}, {14})
    assert found[4].tolist() == [(lane == 1) + 2 * (lane % 4 == 1) for lane in active]
    assert (set(found[5]), set(found[6])) == ({1 + 4}, {1})
    assert found[7].tolist() == [lane // 4 * 4 + 1 for lane in active]
    assert found[8].tolist() == [1 + 2 * (lane // 4 == 2) + 4 for lane in active]


@pytest.mark.parametrize("memory", ["device", "threadgroup"])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_atomic_functions(kind: str, memory: str) -> None:
    operations: dict[str, Callable[[int, int], int]] = {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "min": min, "max": max, "and": lambda x, y: x & y,
        "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    }  # fmt: skip
    place = f"device atomic_{kind}* at = (device atomic_{kind}*)out;" if memory == "device" else (
        f"threadgroup atomic_{kind} own; threadgroup atomic_{kind}* at = &own;")  # fmt: skip
    order = "memory_order_relaxed"
    body = place + "".join(
        f"atomic_store_explicit(at, 12, {order}); out[{2 * n + 2}] = atomic_fetch_{name}_explicit(at, 10, {order}); "
        f"out[{2 * n + 3}] = atomic_load_explicit(at, {order});"
        for n, name in enumerate(operations)
    )
    body += f"""
        {kind} wanted = 3;
        out[20] = atomic_compare_exchange_weak_explicit(at, &wanted, 4, {order}, {order}); out[21] = wanted;
        out[22] = atomic_compare_exchange_weak_explicit(at, &wanted, 4, {order}, {order});
        out[23] = atomic_exchange_explicit(at, 9, {order});
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst);"""
    found = computed(body, kind=kind)
    expected = [number for each in operations.values() for number in (12, each(12, 10))]
    assert found[2:16] == expected
    assert found[20:24] == [0, 12 ^ 10, 1, 4]


def test_atomics_of_floats_bools_and_64_bits() -> None:
    order = "memory_order_relaxed"
    body = f"""
        device atomic_float* x = (device atomic_float*)out;
        atomic_store_explicit(x, 1.5f, {order});
        atomic_fetch_add_explicit(x, 2.0f, {order}); atomic_fetch_sub_explicit(x, 0.5f, {order});
        threadgroup atomic_bool flag; atomic_store_explicit(&flag, true, {order}); bool wanted = true;
        out[1] = atomic_compare_exchange_weak_explicit(&flag, &wanted, false, {order}, {order});
        out[2] = atomic_exchange_explicit(&flag, true, {order}); out[3] = atomic_load_explicit(&flag, {order});
        device atomic_ulong* u = (device atomic_ulong*)p0;
        atomic_max_explicit(u, 1ul << 63, {order}); out[4] = p0[0];
        atomic_min_explicit(u, 7ul, {order}); out[5] = p0[0];"""
    assert computed(body, torch.tensor([5], dtype=torch.int64).to(torch.uint64))[:6] == [3.0, 1, 0, 1, 2.0**63, 7]


def test_constants_and_limits() -> None:
    constants = {
        "E": math.e, "LOG2E": math.log2(math.e), "LOG10E": math.log10(math.e), "LN2": math.log(2),
        "LN10": math.log(10), "PI": math.pi, "PI_2": math.pi / 2, "PI_4": math.pi / 4, "1_PI": 1 / math.pi,
        "2_PI": 2 / math.pi, "2_SQRTPI": 2 / math.sqrt(math.pi), "SQRT2": math.sqrt(2), "SQRT1_2": math.sqrt(0.5),
    }  # fmt: skip
    for kind, suffix in (("float", "F"), ("half", "H"), ("bfloat", "BF")):
        body = " ".join(f"out[{at}] = M_{name}_{suffix};" for at, name in enumerate(constants))
        right = torch.tensor([*constants.values()], dtype=torch.float64).to(DTYPES[kind]).double().tolist()
        assert computed(body, size=len(constants)) == right, kind
    expected: dict[str, float] = {
        "INFINITY": math.inf, "HUGE_VALF": math.inf, "HUGE_VALH": math.inf, "HUGE_VALBF": math.inf, "isnan(NAN)": 1,
        "MAXFLOAT": torch.finfo(torch.float32).max, "MAXHALF": 65504, "MAXBFLOAT": torch.finfo(torch.bfloat16).max,
        "FLT_DIG + FLT_MANT_DIG + FLT_MAX_EXP + FLT_MIN_EXP": 6 + 24 + 128 - 125,
        "HALF_DIG + HALF_MAX_EXP + HALF_MIN_EXP": 6,
        "FLT_EPSILON": 2.0**-23, "HALF_EPSILON": 2.0**-10, "HALF_MIN": 2.0**-14, "CHAR_BIT": 8, "CHAR_MIN": -128,
        "SCHAR_MAX + UCHAR_MAX + USHRT_MAX + SHRT_MIN": 127 + 255 + 65535 - 32768, "1.5bf + 25e-1BF": 4.0, "0.5h": 0.5,
    }  # fmt: skip
    for kind, dtype in DTYPES.items():
        limit = f"numeric_limits<{kind}>::"
        if kind in INTEGERS:
            info: Any = torch.iinfo(dtype)
            expected |= {f"{limit}digits": info.bits - (info.min < 0), f"{limit}min()": float(info.min)}
        else:
            info = torch.finfo(dtype)
            expected |= {f"{limit}epsilon()": info.eps, f"{limit}min()": info.tiny, f"{limit}lowest()": info.min}
            expected |= {f"{limit}infinity()": math.inf, f"{limit}denorm_min()": info.smallest_normal * info.eps}
        expected |= {f"{limit}max()": torch.tensor(float(info.max)).item(), f"{limit}is_signed": info.min < 0}
    rows = " ".join(f"out[{at}] = float({row});" for at, row in enumerate(expected))
    assert dict(zip(expected, computed(rows, size=len(expected)), strict=True)) == expected


SYNTAX: dict[str, list[float]] = {
    "float2 v(1, 2); out[0] = v.y;": [2],
    "const float3 v(float2(1, 2), 3); out[0] = v.z;": [3],
    "float4 v = {1, 2, 3, 4}; v.xy = v.zw; v.z += v.x; v.wx = v.xy; out[0] = v.w; out[1] = v.x;": [3, 4],
    "float4 v = float4(float2(1, 2).yx, 3, 4); v.rgb *= 2; out[0] = v.r; out[1] = v.a;": [4, 4],
    "vec<half, 2> v(1.0h, 2.0h); out[0] = v.y;": [2],
    "bool3 b = bool3(true, false, true); bool2 c = b.xz; out[0] = all(c); out[1] = any(b.yz && c);": [1, 1],
    "float3 m = float3(float3(1, 5, 2) > 1.5f); out[0] = m.x; out[1] = m.y; out[2] = float4(bool4(true)).w;": [0, 1, 1],
    "int2 k = int2(3, -4); float2 v = float2(k); out[0] = v.x; out[1] = v.y; out[2] = max(v, 0.0f).y;": [3, -4, 0],
    "float2 v = float2(1, 2) > 1.5f ? float2(5) : float2(6); out[0] = v.x; out[1] = v.y;": [6, 5],
    "packed_float3 p(1, 2, 3); p += float3(1); out[0] = p.z; out[1] = p.xy.y; out[2] = dot(p, p);": [4, 3, 29],
    "packed_short2 p = short2(1, 2); packed_half4 h = half4(3); out[0] = p.y + h.w + (h * 2.0h).x;": [11],
    "out[0] = sizeof(packed_float3); out[1] = sizeof(float3); out[2] = sizeof(packed_uchar4);": [12, 16, 4],
    "array<float, 3> r = {1, 2, 3}; for (auto x : r) out[0] += x; out[1] = r.size(); out[2] = r.back();": [6, 3, 3],
    "out[0] = lum.y; out[1] = far.w + far.x; out[2] = table[i + 1].z;": [0.5, 3.25, 7],
    "out[0] = fast::exp(0.0f) + precise::divide(4.0f, 2.0f);": [3],
    "out[0] = metal::fast::normalize(float2(3, 4)).y;": [0.8],
    "out[0] = (i == 0 ? float2(1, 2) : float2(3, 4)).y;": [2],
    "float2 v = float2(1, 4); out[0] = mix(0.0f, 2.0f, v).y; out[1] = min3(v, 3.0f, 5.0f).y;": [8, 3],
    "float2 v = pow(float2(2, 3), 2.0f); out[0] = v.y; out[1] = smoothstep(0.0f, 18.0f, v).y;": [9, 0.5],
    "uniform<uint> u = make_uniform(3u); out[0] = u + is_uniform(u);": [4],
    "make_signed_t<uint> s = -1; remove_reference_t<float&> f = 2; intptr_t p = 3; out[0] = s + f + p;": [4],
}  # fmt: skip


@pytest.mark.parametrize("body", SYNTAX)
def test_vectors_and_types_as_metal_spells_them(body: str) -> None:
    head = """
        constant float3 lum = float3(0.25, 0.5, 0.125);
        constant float4 far = float4(lum, 3.0);
        constant float4 table[2] = {float4(1, 2, 3, 4), float4(5, 6, 7, NAN)};"""
    assert computed(body, head=head)[: len(SYNTAX[body])] == pytest.approx(SYNTAX[body])


def test_every_attribute_of_a_thread() -> None:
    names = {
        "thread_index_in_threadgroup": 45, "thread_index_in_simdgroup": 13, "thread_index_in_quadgroup": 1,
        "simdgroup_index_in_threadgroup": 1, "quadgroup_index_in_threadgroup": 11, "threads_per_simdgroup": 32,
        "thread_execution_width": 32, "simdgroups_per_threadgroup": 2, "quadgroups_per_threadgroup": 13,
        "dispatch_simdgroups_per_threadgroup": 3, "dispatch_quadgroups_per_threadgroup": 18,
        "thread_position_in_grid": 115, "thread_position_in_threadgroup": 45, "threadgroup_position_in_grid": 1,
        "threads_per_grid": 120, "threads_per_threadgroup": 50, "dispatch_threads_per_threadgroup": 70,
        "threadgroups_per_grid": 2,
    }  # fmt: skip
    for kind in ("uint", "ushort"):
        given = ", ".join(f"{kind} v{at} [[{name}]]" for at, name in enumerate(names))
        store = " ".join(f"out[{at}] = v{at};" for at in range(len(names)))
        library = torch.mps.compile_shader(
            f"kernel void all(device uint* out, {given}) {{ if (v11 == 115) {{ {store} }} }}"
        )
        out = torch.zeros(len(names), dtype=torch.uint32, device="mps")
        library.all(out, threads=120, group_size=70)
        assert dict(zip(names, out.cpu().tolist(), strict=True)) == names


@pytest.mark.parametrize(
    ("use", "name"),
    [("texture2d<float, access::read> t; t.read(uint2(0));", "texture2d<float, metal::access::read>"),
     ("sampler s; s.x = 1;", "sampler"), ("os_log_default.log(\"x\");", "os_log_default"),
     ("raytracing::ray r; r.origin = 1;", "ray"),
     ("visible_function_table<int()> t;", "visible_function_table<int ()>")],
)  # fmt: skip
def test_what_the_simulated_device_does_not_have_is_refused_in_one_line(use: str, name: str) -> None:
    with pytest.raises(SyntaxError) as raised:
        computed(use)
    _, *lines = str(raised.value).splitlines()
    assert len(lines) == 1
    assert f"'{name}' is unavailable: Metal has it, and hf_mps' simulated device has no " in lines[0]


def test_function_constants_in_source_are_refused_by_name() -> None:
    with pytest.raises(SyntaxError, match="program_source:4:1: error: hf_mps has no function constants"):
        computed("out[0] = flag;", head="constant bool flag [[function_constant(0)]];")
