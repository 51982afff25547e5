"""A checked kernel finds each access outside what was bound, and a release's kernels stay inside."""

from __future__ import annotations

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.runtime import OutOfBounds
from hf_mps.metal.kernels.values import f32, u32
from tests.metal.kernels.lowering.small import Small


def copying(shift: int) -> Small:
    return Small(
        [("out", "device"), ("given", "constant")],
        [("thread_position_in_grid", "uint")],
        f"""
  %i = zext i32 %thread_position_in_grid to i64
  %j = add i64 %i, {shift}
  %from = getelementptr float, ptr addrspace(2) %given, i64 %j
  %value = load float, ptr addrspace(2) %from
  %to = getelementptr float, ptr addrspace(1) %out, i64 %i
  store float %value, ptr addrspace(1) %to
  ret void""",
    )


def test_what_stays_inside_runs_as_it_does_unchecked() -> None:
    given, out = torch.randn(100), torch.zeros(100)
    copying(0).kernel(checked=True).launch({"out": out, "given": given}, threads=100, group=32)
    assert torch.equal(out, given)


@pytest.mark.parametrize(
    ("shift", "line"),
    [
        (
            3,
            snapshot(
                "small of a test: the thread (97, 0, 0) of the grid touches 4 bytes 400 bytes after the start "
                "of the 400 bytes of given; 3 accesses of this launch are out of bounds"
            ),
        ),
        (
            -1,
            snapshot(
                "small of a test: the thread (0, 0, 0) of the grid touches 4 bytes 4 bytes before the start "
                "of given; 1 accesses of this launch are out of bounds"
            ),
        ),
    ],
)
def test_an_access_outside_is_named_with_its_thread_and_buffer(shift: int, line: str) -> None:
    given, out = torch.randn(102)[1:101], torch.zeros(100)
    with pytest.raises(OutOfBounds) as found:
        copying(shift).kernel(checked=True).launch({"out": out, "given": given}, threads=100, group=32)
    assert str(found.value) == line


def test_a_buffer_that_is_not_bound_is_no_memory() -> None:
    with pytest.raises(OutOfBounds, match="where nothing is bound instead of given"):
        copying(0).kernel(checked=True).launch({"out": torch.zeros(4), "given": None}, threads=4, group=4)


def test_a_neighbour_in_the_same_storage_is_outside_too() -> None:
    whole = torch.zeros(200)
    with pytest.raises(OutOfBounds, match="of out; 100 accesses"):
        copying(0).kernel(checked=True).launch({"out": whole[:100], "given": whole}, threads=200, group=32)


def test_a_release_s_kernels_with_and_without_barriers_are_checked(release: str) -> None:
    kernels = Release(release, checked=True)
    rows, weight = torch.randn(7, 384), torch.rand(384)
    out = torch.empty_like(rows)
    arguments = {"x": rows, "w": weight, "out": out, "eps": f32(1e-5), "axis_size": u32(384), "w_stride": u32(1)}
    kernels.kernel("rms_norm_float").launch(arguments, groups=7, group=96)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(rows, (384,), weight, 1e-5))
    with pytest.raises(OutOfBounds, match=r"^rms_norm_float of torch .* of x; 768 accesses"):
        kernels.kernel("rms_norm_float").launch({**arguments, "x": rows[:6]}, groups=7, group=96)
