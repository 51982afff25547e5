"""Integer intrinsics against Python's own integers."""

import re

import numpy as np
import pytest

from tests.metal.kernels.intrinsics.harness import run
from tests.metal.kernels.intrinsics.test_coverage import DECLARED
from tests.metal.kernels.intrinsics.values import integers

NAMES = [found[1] for line in DECLARED if (found := re.search(r"@(air\.(?:min|max|abs|clamp)\.[us]\.i\d+)\(", line))]


@pytest.mark.parametrize("name", NAMES)
def test_extrema_and_absolute_values(name: str) -> None:
    operation, sign, bits = re.search(r"air\.(\w+)\.([us])\.i(\d+)", name).groups()  # type: ignore[union-attr]
    a = integers(int(bits), sign == "s")
    b, c = np.roll(a, 7), np.roll(a, 13)
    if operation == "abs":
        want = np.abs(a)  # the lowest number stays
        np.testing.assert_array_equal(run(name, a).view(a.dtype), want)
    elif operation == "clamp":
        low, high = np.minimum(b, c), np.maximum(b, c)
        np.testing.assert_array_equal(run(name, a, low, high).view(a.dtype), np.clip(a, low, high))
    else:
        want = getattr(np, f"{operation}imum")(a, b)
        np.testing.assert_array_equal(run(name, a, b).view(a.dtype), want)


def test_all_and_any_of_a_vector() -> None:
    bools = np.array(np.meshgrid(*[[False, True]] * 3)).reshape(3, -1).T
    np.testing.assert_array_equal(run("air.all.v3i1", bools), bools.all(axis=1))
    pairs = np.ascontiguousarray(bools[:, :2])
    np.testing.assert_array_equal(run("air.all.v2i1", pairs), pairs.all(axis=1))
    np.testing.assert_array_equal(run("air.any.v2i1", pairs), pairs.any(axis=1))
