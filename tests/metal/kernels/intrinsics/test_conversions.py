"""air.convert: rounding, saturation and special values of each pair of types."""

import re

import numpy as np
import pytest

from hf_mps.metal.kernels.intrinsics import define
from tests.metal.kernels.intrinsics.harness import run
from tests.metal.kernels.intrinsics.test_coverage import DECLARED
from tests.metal.kernels.intrinsics.values import EDGES, all_halves, floats, from_bfloat, integers, to_bfloat

NAMES = [found[1] for line in DECLARED if (found := re.search(r"@(air\.convert\.[\w.]+)\(", line))]
TO_INTEGER = [name for name in NAMES if re.search(r"convert\.[su]\.i\d+\.f\.", name)]
FROM_INTEGER = [name for name in NAMES if re.search(r"convert\.f\.\w+\.[su]\.i", name)]


def source(suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """(arguments as they are stored, their values as floats)."""
    if suffix == "f16":
        return all_halves(), all_halves().astype(np.float32)
    if suffix == "bf16":
        bits = np.arange(65536, dtype=np.uint16)
        return bits, from_bfloat(bits)
    return floats(), floats()


@pytest.mark.rotated
@pytest.mark.parametrize("name", TO_INTEGER)
def test_to_an_integer_toward_zero_saturating_and_nan_is_zero(name: str) -> None:
    sign, bits, kind = re.search(r"convert\.([su])\.i(\d+)\.f\.(\w+)", name).groups()  # type: ignore[union-attr]
    stored, values = source(kind)
    got = run(name, stored)
    if bits == "1":
        np.testing.assert_array_equal(got, values != 0)  # NaN is not zero
        return
    low, high = (-(2 ** (int(bits) - 1)), 2 ** (int(bits) - 1) - 1) if sign == "s" else (0, 2 ** int(bits) - 1)
    exact = [0 if np.isnan(v) else low if v == -np.inf else high if v == np.inf else int(v) for v in values.tolist()]
    want = np.array([min(max(v, low), high) for v in exact], f"{'i' if sign == 's' else 'u'}{int(bits) // 8}")
    np.testing.assert_array_equal(got.view(want.dtype), want)


def test_values_outside_of_the_range_become_its_ends() -> None:
    np.testing.assert_array_equal(run("air.convert.s.i8.f.f32", np.float32([128, -129, 300])), [127, -128, 127])
    np.testing.assert_array_equal(run("air.convert.u.i8.f.f32", np.float32([300, -1])).view(np.uint8), [255, 0])


@pytest.mark.parametrize("name", FROM_INTEGER)
def test_from_an_integer_to_the_nearest(name: str) -> None:
    kind, sign, bits = re.search(r"convert\.f\.(\w+)\.([su])\.i(\d+)", name).groups()  # type: ignore[union-attr]
    values = np.array([False, True]) if bits == "1" else integers(int(bits), sign == "s")
    got = run(name, values)
    single = values.astype(np.float32)
    if kind == "bf16":
        np.testing.assert_array_equal(got, to_bfloat(single))
    else:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, single.astype({"f16": np.float16, "f32": np.float32}[kind]))


def test_between_half_and_bfloat() -> None:
    halves = all_halves()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(
            from_bfloat(run("air.convert.f.bf16.f.f16", halves)), from_bfloat(to_bfloat(halves.astype(np.float32)))
        )
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(run("air.convert.f.f16.f.bf16", bits), from_bfloat(bits).astype(np.float16))


def test_vectors_convert_element_by_element() -> None:
    x = np.resize(floats(4000), (1000, 4))
    with np.errstate(over="ignore", invalid="ignore"):
        halves = x.astype(np.float16)
    np.testing.assert_array_equal(run("air.convert.f.v2f16.f.v2f32", x[:, :2]), halves[:, :2])
    np.testing.assert_array_equal(run("air.convert.f.v4f16.f.v4f32", x), halves)
    np.testing.assert_array_equal(run("air.convert.f.v2f32.f.v2f16", halves[:, :2]), halves[:, :2].astype(np.float32))
    np.testing.assert_array_equal(run("air.convert.f.v4f32.f.v4f16", halves), halves.astype(np.float32))
    bfloats = to_bfloat(x)
    got = run("air.convert.f.v4bf16.f.v4f32", x)
    np.testing.assert_array_equal(from_bfloat(got), from_bfloat(bfloats))
    np.testing.assert_array_equal(run("air.convert.f.v4f32.f.v4bf16", bfloats), from_bfloat(bfloats))
    words = integers(32, signed=False)[:3000].reshape(-1, 3)
    np.testing.assert_array_equal(run("air.convert.u.v3i64.u.v3i32", words).view(np.uint64), words)
    np.testing.assert_array_equal(run("air.convert.s.v2i64.u.v2i32", words[:, :2]), words[:, :2])


def test_ties_go_to_even_and_subnormals_stay() -> None:
    ties = from_bfloat(np.arange(0, 65536, 7, dtype=np.uint16))
    ties = (ties.view(np.uint32) | 0x8000).view(np.float32)
    ties = np.concatenate([ties[~np.isnan(ties)], EDGES])
    assert define("hf.bfloat.f32")
    np.testing.assert_array_equal(from_bfloat(run("hf.bfloat.f32", ties)), from_bfloat(to_bfloat(ties)))
    tiny = np.float32([2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 3 * 2.0**-25])
    np.testing.assert_array_equal(
        run("air.convert.f.v2f16.f.v2f32", tiny.reshape(2, 2)), np.float16([[2.0**-24, 0], [2.0**-24, 2.0**-23]])
    )
