"""Threads that wait for one another: barriers, simd operations of some lanes, threadgroup memory."""

from __future__ import annotations

import pytest
import torch

from hf_mps.core.errors import RunError
from tests.metal.kernels.lowering.small import ATTRIBUTES, DECLARES, Small

REVERSE = Small(
    [("out", "device"), ("given", "constant")],
    [*ATTRIBUTES, ("threads_per_threadgroup", "uint")],
    """
  %i = zext i32 %thread_position_in_threadgroup to i64
  %base = mul i32 %threadgroup_position_in_grid, %threads_per_threadgroup
  %last = sub i32 %threads_per_threadgroup, 1
  %back = sub i32 %last, %thread_position_in_threadgroup
  %b = zext i32 %back to i64
  %own = add i32 %base, %thread_position_in_threadgroup
  %o = zext i32 %own to i64
  %from = getelementptr i32, ptr addrspace(2) %given, i64 %o
  %value = load i32, ptr addrspace(2) %from
  %put = getelementptr [64 x i32], ptr addrspace(3) @shared, i64 0, i64 %i
  store i32 %value, ptr addrspace(3) %put
  call void @air.wg.barrier(i32 2, i32 1)
  %take = getelementptr [64 x i32], ptr addrspace(3) @shared, i64 0, i64 %b
  %other = load i32, ptr addrspace(3) %take
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %o
  store i32 %other, ptr addrspace(1) %to
  ret void""",
    DECLARES + "@shared = internal addrspace(3) global [64 x i32] undef, align 4",
)


def test_a_barrier_stands_between_what_a_group_writes_and_reads() -> None:
    given, out = torch.arange(50 * 64, dtype=torch.int32), torch.zeros(50 * 64, dtype=torch.int32)
    REVERSE.kernel().launch({"out": out, "given": given}, groups=50, group=64)
    assert torch.equal(out.view(50, 64), given.view(50, 64).flip(1))


def test_each_core_has_threadgroup_memory_of_its_own() -> None:
    given, out = torch.arange(4000 * 64, dtype=torch.int32), torch.zeros(4000 * 64, dtype=torch.int32)
    kernel = REVERSE.kernel()
    for _ in range(3):
        kernel.launch({"out": out, "given": given}, groups=4000, group=64)
        assert torch.equal(out.view(4000, 64), given.view(4000, 64).flip(1))


BRANCH = Small(
    [("out", "device")],
    ATTRIBUTES,
    """
  %i = zext i32 %thread_position_in_threadgroup to i64
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %i
  %few = icmp ult i32 %thread_position_in_threadgroup, 8
  br i1 %few, label %some, label %all
some:
  %of.few = call i32 @air.simd_sum.u.i32(i32 %thread_position_in_threadgroup)
  br label %all
all:
  %before = phi i32 [ 0, %start ], [ %of.few, %some ]
  %of.all = call i32 @air.simd_sum.u.i32(i32 1)
  %high = mul i32 %of.all, 1000
  %both = add i32 %high, %before
  store i32 %both, ptr addrspace(1) %to
  ret void""",
    DECLARES,
)


@pytest.mark.parametrize("threads", [32, 20, 70])
def test_a_branch_of_some_lanes_sums_those_and_all_meet_after_it(threads: int) -> None:
    out = torch.zeros(threads, dtype=torch.int32)
    BRANCH.kernel().launch({"out": out}, groups=1, group=threads)
    for thread, found in enumerate(out.tolist()):
        lanes = min(32, threads - thread // 32 * 32)
        assert found == 1000 * lanes + (28 if thread < 8 else 0)


TURNS = Small(
    [("out", "device")],
    ATTRIBUTES,
    """
  %i = zext i32 %thread_position_in_threadgroup to i64
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %i
  br label %loop
loop:
  %turn = phi i32 [ 0, %start ], [ %turn.next, %loop ]
  %sum = phi i32 [ 0, %start ], [ %sum.next, %loop ]
  %here = call i32 @air.simd_sum.u.i32(i32 1)
  %sum.next = add i32 %sum, %here
  %turn.next = add i32 %turn, 1
  %more = icmp ule i32 %turn.next, %thread_position_in_threadgroup
  br i1 %more, label %loop, label %end
end:
  store i32 %sum.next, ptr addrspace(1) %to
  ret void""",
    DECLARES,
)


def test_in_a_loop_the_lanes_that_left_it_take_no_part() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    TURNS.kernel().launch({"out": out}, groups=1, group=32)
    assert out.tolist() == [sum(32 - turn for turn in range(lane + 1)) for lane in range(32)]


GIVEN_MEMORY = Small(
    [("out", "device"), ("memory", "threadgroup")],
    ATTRIBUTES,
    """
  %i = zext i32 %thread_position_in_threadgroup to i64
  %put = getelementptr i32, ptr addrspace(3) %memory, i64 %i
  store i32 %thread_position_in_threadgroup, ptr addrspace(3) %put
  call void @air.wg.barrier(i32 2, i32 1)
  %near = xor i64 %i, 1
  %take = getelementptr i32, ptr addrspace(3) %memory, i64 %near
  %other = load i32, ptr addrspace(3) %take
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %i
  store i32 %other, ptr addrspace(1) %to
  ret void""",
    DECLARES,
)


def test_threadgroup_memory_that_the_host_asks_for_is_there() -> None:
    out = torch.zeros(16, dtype=torch.int32)
    GIVEN_MEMORY.kernel().launch({"out": out}, groups=1, group=16, threadgroup={1: 64})
    assert out.tolist() == [at ^ 1 for at in range(16)]


def test_an_intrinsic_nobody_knows_is_named() -> None:
    small = Small(
        [("out", "device")],
        ATTRIBUTES,
        "  %x = call float @air.of_the_future.f32(float 1.0)\n  store float %x, ptr addrspace(1) %out\n  ret void",
        "declare float @air.of_the_future.f32(float)",
    )
    with pytest.raises(RunError, match=r"the kernel small calls air\.of_the_future\.f32, whose meaning"):
        small.kernel()


def test_an_attribute_nobody_knows_is_named() -> None:
    small = Small([("out", "device")], [("amplification_id", "uint")], "  ret void")
    with pytest.raises(RunError, match=r"the kernel small asks for \[\[amplification_id\]\]"):
        small.kernel()
