"""Every thread of a grid runs once, with Metal's positions: in 1 to 3 dimensions, and where a group is not full."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_mps.metal.kernels import runtime
from tests.metal.kernels.lowering.small import Small

POSITIONS = Small(
    [("out", "device")],
    [
        ("thread_position_in_grid", "uint3"),
        ("thread_position_in_threadgroup", "uint3"),
        ("threadgroup_position_in_grid", "uint3"),
        ("threads_per_threadgroup", "uint3"),
        ("threads_per_grid", "uint3"),
        ("thread_index_in_threadgroup", "uint"),
        ("thread_index_in_simdgroup", "ushort"),
        ("simdgroup_index_in_threadgroup", "uint"),
    ],
    """
  %x = extractelement <3 x i32> %thread_position_in_grid, i32 0
  %y = extractelement <3 x i32> %thread_position_in_grid, i32 1
  %z = extractelement <3 x i32> %thread_position_in_grid, i32 2
  %w = extractelement <3 x i32> %threads_per_grid, i32 0
  %h = extractelement <3 x i32> %threads_per_grid, i32 1
  %zh = mul i32 %z, %h
  %zhy = add i32 %zh, %y
  %row = mul i32 %zhy, %w
  %index = add i32 %row, %x
  %wide = zext i32 %index to i64
  %at = getelementptr [16 x i32], ptr addrspace(1) %out, i64 %wide
  %p0 = getelementptr i32, ptr addrspace(1) %at, i64 0
  %ran = load i32, ptr addrspace(1) %p0
  %more = add i32 %ran, 1
  store i32 %more, ptr addrspace(1) %p0
  %p1 = getelementptr i32, ptr addrspace(1) %at, i64 1
  store <3 x i32> %thread_position_in_threadgroup, ptr addrspace(1) %p1, align 4
  %p4 = getelementptr i32, ptr addrspace(1) %at, i64 4
  store <3 x i32> %threadgroup_position_in_grid, ptr addrspace(1) %p4, align 4
  %p7 = getelementptr i32, ptr addrspace(1) %at, i64 7
  store <3 x i32> %threads_per_threadgroup, ptr addrspace(1) %p7, align 4
  %p10 = getelementptr i32, ptr addrspace(1) %at, i64 10
  store i32 %thread_index_in_threadgroup, ptr addrspace(1) %p10
  %lane = zext i16 %thread_index_in_simdgroup to i32
  %p11 = getelementptr i32, ptr addrspace(1) %at, i64 11
  store i32 %lane, ptr addrspace(1) %p11
  %p12 = getelementptr i32, ptr addrspace(1) %at, i64 12
  store i32 %simdgroup_index_in_threadgroup, ptr addrspace(1) %p12
  BARRIER
  ret void""",
)
WAITING = Small(
    POSITIONS.buffers,
    POSITIONS.attributes,
    POSITIONS.body.replace("BARRIER", "call void @air.wg.barrier(i32 2, i32 1)"),
    "declare void @air.wg.barrier(i32, i32)",
)
PLAIN = Small(POSITIONS.buffers, POSITIONS.attributes, POSITIONS.body.replace("BARRIER", ""))


def expected(position: tuple[int, ...], threads: tuple[int, ...], group: tuple[int, ...]) -> list[int]:
    inside = [at % size for at, size in zip(position, group, strict=True)]
    number = [at // size for at, size in zip(position, group, strict=True)]
    size = [min(each, whole - at * each) for at, each, whole in zip(number, group, threads, strict=True)]
    index = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
    return [1, *inside, *number, *size, index, index % 32, index // 32]


@pytest.mark.parametrize("small", [PLAIN, WAITING], ids=["a loop", "places"])
@pytest.mark.parametrize(
    ("threads", "group"),
    [
        ((70, 1, 1), (32, 1, 1)),
        ((1, 1, 1), (1, 1, 1)),
        ((7, 9, 1), (4, 4, 1)),
        ((5, 3, 7), (2, 3, 4)),
        ((33, 2, 2), (33, 2, 2)),
    ],
)
def test_positions_are_metals(small: Small, threads: tuple[int, int, int], group: tuple[int, int, int]) -> None:
    out = torch.zeros(*reversed(threads), 16, dtype=torch.int32)
    small.kernel().launch({"out": out}, threads=threads, group=group)
    for position in itertools.product(*map(range, threads)):
        x, y, z = position
        assert out[z, y, x, :13].tolist() == expected(position, threads, group)


@pytest.mark.parametrize("small", [PLAIN, WAITING], ids=["a loop", "places"])
def test_a_large_grid_is_spread_over_the_cores_and_each_thread_runs_once(small: Small) -> None:
    out = torch.zeros(100_000, 16, dtype=torch.int32)
    small.kernel().launch({"out": out}, threads=100_000, group=256)
    assert (out[:, 0] == 1).all()


@pytest.mark.parametrize(("seconds", "shares"), [(1e-6, 0), (1.0, 1)])
def test_a_grid_whose_last_run_was_short_is_left_to_one_core(
    seconds: float, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[int] = []
    others = runtime._others
    monkeypatch.setattr(runtime, "_cores", lambda: 2)
    monkeypatch.setattr(runtime, "_others", lambda cores: handed.append(1) or others(cores))
    out = torch.zeros(100_000, 16, dtype=torch.int32)
    kernel = PLAIN.kernel()
    kernel.launch({"out": out}, threads=100_000, group=256)
    assert len(handed) == 1
    kernel._seconds = dict.fromkeys(kernel._seconds, seconds)
    kernel.launch({"out": out}, threads=100_000, group=256)
    assert len(handed) == 1 + shares
    assert (out[:, 0] == 2).all()
    others(2).shutdown()
    others.cache_clear()


def test_a_grid_of_nothing_runs_nothing() -> None:
    out = torch.zeros(1, 16, dtype=torch.int32)
    PLAIN.kernel().launch({"out": out}, threads=0, group=32)
    assert not out.any()


def test_a_vector_in_a_buffer_may_begin_at_any_element() -> None:
    """Metal leaves it undefined; a kernel of 2.12.1 does it to a tensor with an offset, and it must not end Python."""
    four = Small(
        [("out", "device"), ("given", "constant")],
        [("thread_position_in_grid", "uint")],
        """
  %i = zext i32 %thread_position_in_grid to i64
  %from = getelementptr <4 x float>, ptr addrspace(2) %given, i64 %i
  %values = load <4 x float>, ptr addrspace(2) %from, align 16
  %to = getelementptr <4 x float>, ptr addrspace(1) %out, i64 %i
  store <4 x float> %values, ptr addrspace(1) %to, align 16
  ret void""",
    )
    given, out = torch.randn(41)[1:], torch.zeros(41)[1:]
    four.kernel().launch({"out": out, "given": given}, threads=10, group=4)
    assert torch.equal(out, given)
