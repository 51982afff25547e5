"""Atomics: what memory holds afterwards, what is returned, and that threads lose nothing."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hf_mps.metal.kernels.intrinsics import define
from tests.metal.kernels.intrinsics.harness import compiled, linked, run

RELAXED = (np.zeros(1, np.int32), np.full(1, 2, np.int32), np.ones(1, np.bool_))


def test_a_sum_of_floats_is_rounded_at_each_step() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    total = np.zeros(1, np.float32)
    before = run("air.atomic.global.add.f32", total, values, *RELAXED)
    steps = np.cumsum(values, dtype=np.float32)
    assert total[0] == steps[-1]
    np.testing.assert_array_equal(before[1:], steps[:-1])


@pytest.mark.parametrize(("suffix", "dtype"), [("i32", np.int32), ("f32", np.float32)])
def test_compare_and_exchange_tells_what_was_there(suffix: str, dtype: type) -> None:
    place = np.array([1, 2], dtype)
    expected = np.array([1, 9], dtype)
    order = np.zeros(1, np.int32)
    desired = np.array([10, 20], dtype)
    old = run(f"air.atomic.global.cmpxchg.weak.{suffix}", place, expected, desired, order, *RELAXED)
    np.testing.assert_array_equal(old, [1, 2])
    np.testing.assert_array_equal(place, [10, 2])
    np.testing.assert_array_equal(expected, [1, 2])


def test_a_nan_is_exchanged_for_itself() -> None:
    place, expected = np.float32([np.nan]), np.float32([np.nan])
    run("air.atomic.global.cmpxchg.weak.f32", place, expected, np.float32([1]), np.zeros(1, np.int32), *RELAXED)
    assert place[0] == 1


def test_threads_that_add_at_once_lose_nothing() -> None:
    definition = define("air.atomic.global.add.f32")
    assert definition
    engine = compiled(
        linked([definition])
        + """
define void @add(ptr %p, i64 %n) {
entry:
  %q = addrspacecast ptr %p to ptr addrspace(1)
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %o = call float @air.atomic.global.add.f32(ptr addrspace(1) %q, float 1.0, i32 0, i32 2, i1 true)
  %next = add i64 %i, 1
  %end = icmp eq i64 %next, %n
  br i1 %end, label %exit, label %loop
exit:
  ret void
}
"""
    )
    total = np.zeros(1, np.float32)
    add = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("add"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: add(total.ctypes.data, 200_000), range(4)))
    assert total[0] == 800_000


@pytest.mark.parametrize(
    "name", ["global.add.i32", "global.fadd.f32", "global.xchg.i64", "global.min.f32", "local.add.u.i8"]
)
def test_what_metal_has_not_is_unknown(name: str) -> None:
    assert define(f"air.atomic.{name}") is None
