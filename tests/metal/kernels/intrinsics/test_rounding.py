"""Rounding, extrema, remainders, products and neighbours: exact, or rounded once."""

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.metal.kernels.intrinsics.harness import run
from tests.metal.kernels.intrinsics.values import EDGES, all_halves, floats

# numpy warns of the infinities and NaN that are meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal, the signs of zeros included."""
    np.testing.assert_array_equal(got, want)
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


def test_the_fraction_stays_below_one_and_nan_stays() -> None:
    x = floats()
    want = np.minimum((x - np.floor(x)), np.float32(1 - 2.0**-24))
    same(run("air.fract.f32", x), want)
    same(run("air.fract.v3f32", x[:9999].reshape(-1, 3)), want[:9999].reshape(-1, 3))
    assert run("air.fract.f32", np.float32([-1e-30]))[0] == np.float32(1 - 2.0**-24)


def test_clamp_is_fmin_of_fmax() -> None:
    low, high = np.full_like(EDGES, -2.5), np.full_like(EDGES, 100.0)
    np.testing.assert_array_equal(run("air.clamp.f32", EDGES, low, high), np.fmin(np.fmax(EDGES, -2.5), 100))


def test_a_fused_product_is_rounded_once() -> None:
    random = np.random.default_rng(0)
    a, b, c = random.standard_normal((3, 2000)).astype(np.float32)
    c[:1000] = -(a[:1000] * b[:1000])  # what is left is the product's own rounding
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(run("air.fma.f32", a, b, c), np.float32([float(x) for x in exact]))
    x = np.stack([a, b, c, a], axis=1)
    np.testing.assert_array_equal(run("air.fma.v4f32", x, x, x)[:, 0], run("air.fma.f32", a, a, a))


def test_a_fused_product_of_halves_is_rounded_once() -> None:
    bits = np.random.default_rng(0).integers(0, 65536, (3, 20_000), dtype=np.uint16)
    bits[:, :5_000] &= 0xBFFF  # small numbers, where a second rounding would show
    a, b, c = bits.view(np.float16)
    keep = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[keep], b[keep], c[keep]
    want = np.float16(
        [_half(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)]
    )
    np.testing.assert_array_equal(run("air.fma.f16", a, b, c), want)


def _half(exact: Fraction) -> float:
    """The half nearest to an exact number, ties to even, as numpy then reads it without rounding again."""
    if exact == 0:
        return 0.0
    exponent = max(math.frexp(float(abs(exact)))[1] - 11, -24)
    steps = exact / Fraction(2) ** exponent
    value = float(round(steps) * Fraction(2) ** exponent)
    return math.copysign(math.inf, value) if abs(value) > 65504 else value


def test_dot_products() -> None:
    random = np.random.default_rng(0)
    for width in (2, 3, 4):
        a, b = random.standard_normal((2, 1000, width)).astype(np.float32)
        exact = (a.astype(np.float64) * b).sum(axis=1)
        scale = (np.abs(a.astype(np.float64) * b)).sum(axis=1)
        assert (np.abs(run(f"air.dot.v{width}f32", a, b) - exact) <= 2.0**-22 * scale).all()
    a, b = random.standard_normal((2, 1000, 2)).astype(np.float16)
    want = (a.astype(np.float32) * b.astype(np.float32)).sum(axis=1).astype(np.float16)
    np.testing.assert_array_equal(run("air.dot.v2f16", a, b), want)


def test_scaling_by_powers_of_two_is_rounded_once() -> None:
    x = floats()
    powers = np.random.default_rng(0).integers(-320, 320, len(x), dtype=np.int32)
    np.testing.assert_array_equal(run("air.ldexp.f32", x, powers), np.ldexp(x, powers))
    far = np.full(len(EDGES), 2**31 - 1, np.int32)
    np.testing.assert_array_equal(run("air.ldexp.f32", EDGES, far), np.ldexp(EDGES, far))
    np.testing.assert_array_equal(run("air.ldexp.f32", EDGES, -far), np.ldexp(EDGES, -far))


def test_neighbours() -> None:
    x, toward = floats(seed=1), np.roll(floats(seed=2), 3)
    toward[::7] = x[::7]
    same(run("air.nextafter.f32", x, toward), np.nextafter(x, toward))
    halves, other = all_halves(), np.random.default_rng(0).permutation(all_halves())
    same(run("air.nextafter.f16", halves, other), np.nextafter(halves, other))
    tiny = np.float32([0.0, -0.0, 0.0, -1.4e-45])
    same(run("air.nextafter.f32", tiny, np.float32([1, -1, -0.0, 1])), np.float32([1.4e-45, -1.4e-45, -0.0, -0.0]))
