"""Operations across lanes against plain loops over the active ones, with all lanes and with some."""

import re

import numpy as np
import pytest

from tests.metal.kernels.intrinsics.harness import run_lanes
from tests.metal.kernels.intrinsics.test_coverage import DECLARED

MASKS = {"all": 0xFFFFFFFF, "the first 8": 0xFF, "one": 1 << 19, "a few": 0b1010_0000_1100_0001_0000_0000_0000_1110}
DTYPES = {"f16": "f2", "f32": "f4", "i8": "1", "i16": "2", "i32": "4"}
UNTOUCHED = 99


def named(pattern: str) -> list[str]:
    return [found[1] for line in DECLARED if (found := re.search(rf"@(air\.{pattern})\(", line))]


def dtype_of(name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """(element type, shape of a value) by an intrinsic's suffix."""
    sign, width, suffix = re.search(r"(?:\.([us]))?\.(?:v(\d))?(\w+)$", name).groups()  # type: ignore[union-attr]
    kind = {"u": "u", "s": "i", None: ""}[sign] + DTYPES[suffix]
    return np.dtype(kind), (int(width),) if width else ()


def draw(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    if dtype.kind == "f":
        return random.standard_normal((32, *shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, (32, *shape), dtype=dtype, endpoint=True)


def active(mask: int) -> list[int]:
    return [lane for lane in range(32) if mask >> lane & 1]


def check(
    name: str, slots: np.ndarray, mask: int, want: dict[int, np.ndarray], dtype: np.dtype, shape: tuple[int, ...]
) -> None:
    """Each active lane has its result, and no other slot was written."""
    result = run_lanes(name, slots, np.full((32, *shape), UNTOUCHED, dtype), mask)
    for lane in range(32):
        np.testing.assert_array_equal(result[lane], want[lane] if lane in want else np.full(shape, UNTOUCHED, dtype))


def slots_of(shape: tuple[int, ...], dtype: np.dtype, **fields: np.ndarray) -> np.ndarray:
    """32 structs as LLVM lays them out: `data` and `fill` are values, others are ushort."""
    parts = [(key, dtype, shape) if key in ("data", "fill") else (key, "u2") for key in fields]
    bare = np.dtype([(key, *rest) for key, *rest in parts], align=True)
    size = dtype.itemsize * int(np.prod(shape, dtype=int))
    slots = np.zeros(32, np.dtype({**_layout(bare), "itemsize": -(-bare.itemsize // size) * size}))
    for key, values in fields.items():
        slots[key] = values
    return slots


def _layout(kind: np.dtype) -> dict[str, list[object]]:
    names = list(kind.names or ())
    fields = [kind.fields[name] for name in names]  # type: ignore[index]
    return {"names": names, "formats": [f[0] for f in fields], "offsets": [f[1] for f in fields]}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", named(r"simd_sum\.[\w.]+"))
def test_sums_in_a_fixed_order(name: str, mask: int) -> None:
    dtype, shape = dtype_of(name)
    values = draw(dtype, shape)
    kept = np.where([mask >> lane & 1 for lane in range(32)], values, dtype.type(0))
    for stride in (16, 8, 4, 2, 1):
        kept = kept + kept[np.arange(32) ^ stride]
    check(name, values, mask, dict.fromkeys(active(mask), kept[0]), dtype, shape)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", named(r"simd_(?:min|max)\.[\w.]+"))
def test_extrema(name: str, mask: int) -> None:
    dtype, shape = dtype_of(name)
    values = draw(dtype, shape)
    want = (np.min if "_min" in name else np.max)(values[active(mask)])
    check(name, values, mask, dict.fromkeys(active(mask), want), dtype, shape)


@pytest.mark.parametrize("name", ["air.simd_min.f32", "air.simd_max.f32", "air.simd_min.f16", "air.simd_max.f16"])
def test_extrema_pass_over_nan_and_know_infinities(name: str) -> None:
    dtype, shape = dtype_of(name)
    values = np.full(32, np.nan, dtype)
    check(name, values, 0xFF, dict.fromkeys(range(8), dtype.type(np.nan)), dtype, shape)
    values[3] = np.inf if "_min" in name else -np.inf
    check(name, values, 0xFF, dict.fromkeys(range(8), values[3]), dtype, shape)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_prefix_sum_leaves_its_own_lane_out(mask: int) -> None:
    values = draw(np.dtype("u4"), ())
    lanes = active(mask)
    before = np.cumsum(np.r_[np.uint32(0), values[lanes][:-1]], dtype=np.uint32)
    check(
        "air.simd_prefix_exclusive_sum.u.i32", values, mask, dict(zip(lanes, before, strict=True)), np.dtype("u4"), ()
    )
    inside = np.cumsum(values[lanes], dtype=np.uint32)
    check(
        "air.simd_prefix_inclusive_sum.u.i32", values, mask, dict(zip(lanes, inside, strict=True)), np.dtype("u4"), ()
    )


def source(how: str, lane: int, distance: int) -> int:
    """The lane that a shuffle takes its value from."""
    if how in ("shuffle", "broadcast"):
        return distance
    if how == "shuffle_xor":
        return lane ^ distance
    target = lane + distance if how.endswith("down") else lane - distance
    return target if 0 <= target < 32 else lane


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", named(r"simd_(?:shuffle|shuffle_xor|shuffle_down|broadcast)\.[\w.]+"))
def test_shuffles(name: str, mask: int) -> None:
    dtype, shape = dtype_of(name)
    values = draw(dtype, shape)
    how = re.search(r"simd_(\w+)\.", name)[1]  # type: ignore[index]
    for distance in (0, 1, 2, 5, 16, 31):
        slots = slots_of(shape, dtype, data=values, distance=np.full(32, distance))
        nothing = np.zeros(shape, dtype)  # from a lane that is not active: undefined in Metal, 0 here
        want = {
            lane: values[at] if mask >> (at := source(how, lane, distance)) & 1 else nothing for lane in active(mask)
        }
        check(name, slots, mask, want, dtype, shape)


def test_a_shuffle_from_outside_gives_zero() -> None:
    values = draw(np.dtype("f4"), ())
    slots = slots_of((), np.dtype("f4"), data=values, distance=np.arange(32) + 16)
    want = {lane: values[lane + 16] if lane < 16 else np.float32(0) for lane in range(32)}
    check("air.simd_shuffle.f32", slots, 0xFFFFFFFF, want, np.dtype("f4"), ())


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", named(r"simd_shuffle_and_fill_\w+\.[\w.]+"))
def test_shuffles_that_fill(name: str, mask: int) -> None:
    """The specification's formula: within vectors of `modulo` lanes, what comes from outside is the filling's."""
    dtype, shape = dtype_of(name)
    data, fill = draw(dtype, shape, 1), draw(dtype, shape, 2)
    for delta, modulo in ((0, 32), (1, 32), (5, 32), (31, 32), (1, 8), (3, 4), (1, 2)):
        slots = slots_of(shape, dtype, data=data, fill=fill, delta=np.full(32, delta), modulo=np.full(32, modulo))
        want = {}
        for lane in active(mask):
            first, inside = lane - lane % modulo, lane % modulo
            target = inside - delta if "_up" in name else inside + delta
            values = data if 0 <= target < modulo else fill
            at = first + target % modulo
            want[lane] = values[at] if mask >> at & 1 else np.zeros(shape, dtype)
        check(name, slots, mask, want, dtype, shape)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_votes(mask: int) -> None:
    kind = np.dtype(bool)
    lanes = active(mask)
    for votes in (np.zeros(32, bool), np.ones(32, bool), np.arange(32) == lanes[-1], np.arange(32) != lanes[-1]):
        for name, join in (("any", np.any), ("all", np.all)):
            result = run_lanes(f"air.simd_{name}", votes, np.zeros(32, kind), mask)
            np.testing.assert_array_equal(result[lanes], np.full(len(lanes), join(votes[lanes])))
    first = run_lanes("air.simd_is_first", np.zeros(32, kind), np.zeros(32, kind), mask)
    np.testing.assert_array_equal(np.flatnonzero(first), lanes[:1])
