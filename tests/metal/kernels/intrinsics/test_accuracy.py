"""Exponentials, logarithms, powers and angles: the largest error in units in the last place, and C's special values."""

from collections.abc import Callable

import mpmath
import numpy as np
import pytest

from tests.metal.kernels.intrinsics.harness import run
from tests.metal.kernels.intrinsics.values import all_halves, floats, units

# numpy warns of the infinities and NaN that are meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Function = Callable[..., np.ndarray]
# numpy computes these in double: exact enough to measure half a unit of a float
ORACLES: dict[str, Function] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: np.power(10.0, x),
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
# units in the last place; the Metal Shading Language specification allows precise math 2 to 16
LARGEST = dict.fromkeys(ORACLES, 0.501) | {"exp": 1.0, "exp2": 1.0}
# the ranges that training meets, beside floats of every exponent
RANGES = {"exp": (-104, 89), "exp2": (-150, 128), "exp10": (-45, 38.5), "sinh": (-90, 90), "cosh": (-90, 90)} | {
    "asin": (-1, 1),
    "acos": (-1, 1),
    "log": (0.5, 2),
    "log2": (0.5, 2),
    "log10": (0.5, 2),
}


def samples(name: str) -> np.ndarray:
    low, high = RANGES.get(name, (-20, 20))
    dense = np.linspace(low, high, 300_001, dtype=np.float32)
    return np.concatenate([floats(), dense])


@pytest.mark.parametrize("name", ORACLES)
def test_largest_error_of_floats(name: str) -> None:
    x = samples(name)
    exact = ORACLES[name](x.astype(np.float64))
    # numpy's own reduction of huge angles is exact as well
    assert units(run(f"air.{name}.f32", x), exact) <= LARGEST[name]


@pytest.mark.parametrize("name", ["exp", "exp2", "tanh"])
def test_a_fast_name_is_as_accurate(name: str) -> None:
    x = samples(name)
    np.testing.assert_array_equal(run(f"air.fast_{name}.f32", x), run(f"air.{name}.f32", x))


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sin", "atan"])
def test_a_host_with_avx2_alone_has_the_same_results(name: str) -> None:
    x = floats(50_000)
    here, there = (run(f"air.{name}.f32", x, features=features) for features in (None, "+avx2,+fma,+f16c"))
    np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "sqrt"])
def test_every_half_is_rounded_correctly(name: str) -> None:
    x = all_halves()
    exact = ORACLES[name](x.astype(np.float64))
    np.testing.assert_array_equal(run(f"air.{name}.f16", x), exact.astype(np.float16))


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_huge_angles_are_reduced_exactly(name: str) -> None:
    x = np.arange(0x4D000000, 0x7F800000, 1_000_003, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, -x, np.float32([1e20, -1e20, 3.4028235e38, 2.0**28])])
    got = run(f"air.{name}.f32", x)
    with mpmath.workprec(300):
        errors = [
            abs(float((getattr(mpmath, name)(mpmath.mpf(float(a))) - mpmath.mpf(float(r))) / float(np.spacing(abs(r)))))
            for a, r in zip(x, got, strict=True)
        ]
    assert max(errors) <= 0.501


def test_sine_of_multiples_of_pi() -> None:
    x = np.concatenate([floats(), np.linspace(-50, 50, 200_001, dtype=np.float32)])
    x = x[np.isfinite(x)]
    rest = x.astype(np.float64) - 2 * np.round(x.astype(np.float64) / 2)  # exact, and the sine's period is 2
    got = run("air.sinpi.f32", x)
    whole = rest == np.round(rest)
    np.testing.assert_array_equal(got[whole], 0.0)
    near = np.where(np.abs(rest) > 0.5, np.sign(rest) * (1 - np.abs(rest)), rest)
    assert units(got[~whole], np.sin(np.pi * near[~whole])) <= 0.501
    assert np.isnan(run("air.sinpi.f32", np.float32([np.inf, -np.inf, np.nan]))).all()


def test_cosine_and_tangent_of_multiples_of_pi() -> None:
    x = np.concatenate([floats(), np.linspace(-50, 50, 200_001, dtype=np.float32)])
    x = x[np.isfinite(x)]
    rest = x.astype(np.float64) - 2 * np.round(x.astype(np.float64) / 2)
    got = run("air.cospi.f32", x)
    half = np.abs(rest) == 0.5
    np.testing.assert_array_equal(got[half], 0.0)
    near = np.where(np.abs(rest) > 0.75, -np.cos(np.pi * (1 - np.abs(rest))), np.sin(np.pi * (0.5 - np.abs(rest))))
    assert units(got[~half], near[~half]) <= 0.501
    np.testing.assert_array_equal(run("air.tanpi.f32", np.float32([1e20, -1e20, 2.0**52, 3.0])), 0.0)
    assert np.isnan(run("air.cospi.f32", np.float32([np.inf, -np.inf, np.nan]))).all()


def test_the_inverse_of_the_hyperbolic_cosine_is_no_number_below_one() -> None:
    x = np.float32([0.5, -1.0, -2.0, -1e10, -3e38, -np.inf, np.nan])
    assert np.isnan(run("air.acosh.f32", x)).all()
    more = np.abs(floats()[np.isfinite(floats())]) + np.float32(1)
    assert units(run("air.acosh.f32", more), np.arccosh(more.astype(np.float64))) <= 0.51


def test_sine_and_cosine_at_once() -> None:
    x = samples("sin")
    cosines = np.zeros_like(x)
    np.testing.assert_array_equal(run("air.sincos.f32", x, cosines), run("air.sin.f32", x))
    np.testing.assert_array_equal(cosines, run("air.cos.f32", x))


def test_powers() -> None:
    x, y = floats(seed=1), np.roll(floats(seed=2), 17)
    base, exponent = np.abs(x[:100_000]) % 10, y[:100_000] % 40
    x, y = np.concatenate([x, base]), np.concatenate([y, exponent])
    exact = np.power(x.astype(np.float64), y.astype(np.float64))
    assert units(run("air.pow.f32", x, y), exact) <= 0.501


def test_angles_of_points() -> None:
    y, x = floats(seed=3), np.roll(floats(seed=4), 5)
    near = np.random.default_rng(5).standard_normal((2, 200_000)).astype(np.float32)
    y, x = np.concatenate([y, near[0]]), np.concatenate([x, near[1]])
    exact = np.arctan2(y.astype(np.float64), x.astype(np.float64))
    assert units(run("air.atan2.f32", y, x), exact) <= 0.501
    halves = np.random.default_rng(6).permutation(all_halves())
    exact = np.arctan2(all_halves().astype(np.float64), halves.astype(np.float64))
    np.testing.assert_array_equal(run("air.atan2.f16", all_halves(), halves), exact.astype(np.float16))
