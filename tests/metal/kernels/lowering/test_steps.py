"""What lives across a place, lanes that are not a simdgroup's first, and what a group does once for all its threads."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels.lowering import lanes
from hf_mps.metal.kernels.values import u32
from tests.metal.kernels.lowering.small import ATTRIBUTES, DECLARES, Small

# A variable with an index that is not known, a value of the loop before, and one of the loop itself cross the barrier.
KEPT = Small(
    [("out", "device"), ("turns", "constant")],
    ATTRIBUTES,
    """
  %own = alloca [4 x i32], align 16
  %i = zext i32 %thread_position_in_threadgroup to i64
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %i
  %turns.all = load i32, ptr addrspace(2) %turns
  %slot = and i32 %thread_position_in_threadgroup, 3
  %slot.w = zext i32 %slot to i64
  %mine = getelementptr [4 x i32], ptr %own, i64 0, i64 %slot.w
  store i32 1, ptr %mine
  br label %loop
loop:
  %turn = phi i32 [ 0, %start ], [ %turn.next, %loop ]
  %sum = phi i32 [ 0, %start ], [ %sum.next, %loop ]
  %before = load i32, ptr %mine
  %doubled = shl i32 %before, 1
  store i32 %doubled, ptr %mine
  call void @air.wg.barrier(i32 2, i32 1)
  %lanes = call i32 @air.simd_sum.u.i32(i32 %thread_position_in_threadgroup)
  %now = load i32, ptr %mine
  %both = add i32 %lanes, %now
  %sum.next = add i32 %sum, %both
  %turn.next = add i32 %turn, 1
  %more = icmp ult i32 %turn.next, %turns.all
  br i1 %more, label %loop, label %end
end:
  store i32 %sum.next, ptr addrspace(1) %to
  ret void""",
    DECLARES,
)


@pytest.fixture(params=["with copies", "without copies"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled with a loop of its own for each place, and through @step alone."""
    if request.param == "without copies":
        monkeypatch.setattr(lanes, "LONGEST", 0)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("threads", [32, 5, 33, 128])
@pytest.mark.parametrize("checked", [False, True])
def test_values_and_variables_outlive_the_place_where_a_thread_waits(threads: int, checked: bool) -> None:
    out = torch.zeros(threads, dtype=torch.int32)
    KEPT.kernel(checked=checked).launch({"out": out, "turns": u32(5)}, groups=1, group=threads)
    for thread, found in enumerate(out.tolist()):
        first = thread // 32 * 32
        assert found == 5 * sum(range(first, min(first + 32, threads))) + 2 + 4 + 8 + 16 + 32


# Lanes with an odd number sum among themselves, then those of every third; all of them at the end.
SCATTERED = Small(
    [("out", "device")],
    ATTRIBUTES,
    """
  %i = zext i32 %thread_position_in_threadgroup to i64
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %i
  %low = and i32 %thread_position_in_threadgroup, 1
  %odd = icmp eq i32 %low, 1
  br i1 %odd, label %odds, label %thirds
odds:
  %of.odd = call i32 @air.simd_sum.u.i32(i32 %thread_position_in_threadgroup)
  br label %thirds
thirds:
  %first = phi i32 [ 0, %start ], [ %of.odd, %odds ]
  %rest = urem i32 %thread_position_in_threadgroup, 3
  %third = icmp eq i32 %rest, 0
  br i1 %third, label %some, label %all
some:
  %of.some = call i32 @air.simd_sum.u.i32(i32 1)
  br label %all
all:
  %second = phi i32 [ 0, %thirds ], [ %of.some, %some ]
  call void @air.wg.barrier(i32 2, i32 1)
  %of.all = call i32 @air.simd_sum.u.i32(i32 1)
  %high = mul i32 %of.all, 1000000
  %middle = mul i32 %second, 10000
  %two = add i32 %high, %middle
  %three = add i32 %two, %first
  store i32 %three, ptr addrspace(1) %to
  ret void""",
    DECLARES,
)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("threads", [32, 20, 70])
def test_lanes_that_are_not_the_first_ones_meet_at_their_own_place(threads: int) -> None:
    out = torch.zeros(threads, dtype=torch.int32)
    SCATTERED.kernel().launch({"out": out}, groups=1, group=threads)
    for thread, found in enumerate(out.tolist()):
        simdgroup = range(thread // 32 * 32, min(thread // 32 * 32 + 32, threads))
        odd = sum(lane for lane in simdgroup if lane % 2) if thread % 2 else 0
        third = 10_000 * sum(lane % 3 == 0 for lane in simdgroup) if thread % 3 == 0 else 0
        assert found == 1_000_000 * len(simdgroup) + third + odd


def offset(start: str) -> Small:
    """The sum of a group's threads, plus the digits of `start` in the sizes that `sizes` has, weighed by `sizes`."""
    return Small(
        [("out", "device"), ("sizes", "constant"), ("count", "constant")],
        ATTRIBUTES,
        f"""
  %dimensions = load i32, ptr addrspace(2) %count
  %last = zext i32 %dimensions to i64
  br label %loop
loop:
  %at = phi i64 [ 0, %start ], [ %at.next, %loop ]
  %left = phi i32 [ {start}, %start ], [ %left.next, %loop ]
  %offset = phi i32 [ 0, %start ], [ %offset.next, %loop ]
  %size.at = getelementptr i32, ptr addrspace(2) %sizes, i64 %at
  %size = load i32, ptr addrspace(2) %size.at
  %digit = urem i32 %left, %size
  %left.next = udiv i32 %left, %size
  %part = mul i32 %digit, %size
  %offset.next = add i32 %offset, %part
  %at.next = add i64 %at, 1
  %done = icmp eq i64 %at.next, %last
  br i1 %done, label %sum, label %loop
sum:
  %all = call i32 @air.simd_sum.u.i32(i32 %thread_position_in_threadgroup)
  %both = add i32 %all, %offset.next
  %first = mul i32 %threadgroup_position_in_grid, 32
  %own = add i32 %first, %thread_position_in_threadgroup
  %own.w = zext i32 %own to i64
  %to = getelementptr i32, ptr addrspace(1) %out, i64 %own.w
  store i32 %both, ptr addrspace(1) %to
  ret void""",
        DECLARES,
    )


OF_GROUP, OF_THREAD = offset("%threadgroup_position_in_grid"), offset("%thread_position_in_threadgroup")


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("small", [OF_GROUP, OF_THREAD], ids=["of the group", "of the thread"])
def test_an_offset_is_the_same_wherever_it_is_worked_out(small: Small) -> None:
    sizes, out = [3, 4, 5], torch.zeros(10 * 32, dtype=torch.int32)
    data = torch.tensor(sizes, dtype=torch.int32)
    small.kernel().launch({"out": out, "sizes": data, "count": u32(3)}, groups=10, group=32)
    for at, found in enumerate(out.tolist()):
        left = at // 32 if small is OF_GROUP else at % 32
        expected = sum(range(32))
        for size in sizes:
            expected += left % size * size
            left //= size
        assert found == expected
