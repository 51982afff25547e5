"""Resizing, sampling at a grid's places and pooling run Metal's kernels where the release has them."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_mps.metal.kernels.rules import Dispatch
from hf_mps.metal.kernels.runtime import ALIGNMENT, _placed
from tests.metal.kernels.launch.samples import compared


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing_agrees(kernels: Dispatch, mode: str) -> None:
    given = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    for size in ((5, 7), (20, 4)):
        found = functional.interpolate(given.to("mps"), size, mode=mode, antialias=True)
        wanted = functional.interpolate(given, size, mode=mode, antialias=True)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)
    assert kernels.ledger.operators[f"_upsample_{mode}2d_aa"] == 2


def test_channels_last_images_are_read_and_written_where_they_lie(kernels: Dispatch) -> None:
    given = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    on = given.to("mps").to(memory_format=torch.channels_last)
    kernels.ledger.clear()
    found = functional.interpolate(on, (9, 11), mode="bicubic")
    assert kernels.ledger.operators["upsample_bicubic2d"] == 1
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        found.cpu(), functional.interpolate(given, (9, 11), mode="bicubic"), rtol=1e-4, atol=1e-5
    )


def test_nearest_images_are_mpsgraphs(kernels: Dispatch) -> None:
    functional.interpolate(torch.ones(1, 1, 2, 2, device="mps"), scale_factor=2)
    assert kernels.ledger.operators["upsample_nearest2d"] == 0
    assert kernels.ledger.reasons["upsample_nearest2d", "MPSGraph on this release"] == 1


def test_values_lie_where_vectors_of_four_longs_may() -> None:
    buffers = (ctypes.c_int64 * 64)()
    kept = _placed(buffers, [(2, bytes(32)), (3, bytes(1)), (5, bytes(range(40)))])
    assert all(buffers[location] % ALIGNMENT == 0 for location in (2, 3, 5))
    assert ctypes.string_at(buffers[5], 40) == bytes(range(40))
    del kept


# The kernels compute places in float; sums of a gradient in half are rounded at each of some ten additions.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
PADDINGS = ["zeros", "border", "reflection"]


def sampled(given: Tensor, grid: Tensor, **how: object) -> list[Tensor]:
    """The samples, and both gradients of their squares' sum, half."""
    given, grid = given.clone().requires_grad_(), grid.clone().requires_grad_()
    found = functional.grid_sample(given, grid, **how)  # type: ignore[arg-type]
    found.backward(found.detach())
    assert given.grad is not None
    assert grid.grad is not None
    return [found.detach(), given.grad, grid.grad]


def agree(dtype: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], **how: object) -> None:
    draw = torch.Generator().manual_seed(0)
    given, grid = torch.randn(shapes[0], generator=draw), torch.rand(shapes[1], generator=draw) * 2.6 - 1.3
    given, grid = given.to(dtype), grid.to(dtype)
    wanted = sampled(given.double(), grid.double(), **how)
    found = sampled(given.to("mps"), grid.to("mps"), **how)
    for ours, right in zip(found, wanted, strict=True):
        scale = max(1.0, right.abs().max().item())
        torch.testing.assert_close(ours.cpu().double() / scale, right / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.rotated
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_images_agree(kernels: Dispatch, mode: str, padding: str, dtype: torch.dtype) -> None:
    for align in (False, True):
        agree(dtype, ((2, 3, 5, 6), (2, 4, 7, 2)), mode=mode, padding_mode=padding, align_corners=align)
    assert kernels.ledger.operators["grid_sampler_2d"] == kernels.ledger.operators["grid_sampler_2d_backward"] == 2


def test_only_the_gradient_that_is_asked_for_is_computed(kernels: Dispatch) -> None:
    given = torch.randn(1, 2, 4, 4, device="mps")
    grid = torch.zeros(1, 2, 2, 2, device="mps", requires_grad=True)
    functional.grid_sample(given, grid, align_corners=False).sum().backward()
    assert [name for name in kernels.ledger.kernels if "backward" in name] == [
        "grid_sampler_2d_backward_bilinear_grid_i32_float"
    ]


def test_images_that_are_transposed_are_read_where_they_lie(kernels: Dispatch) -> None:
    draw = torch.Generator().manual_seed(0)
    given, grid = torch.randn(2, 3, 5, 6, generator=draw), torch.rand(2, 4, 4, 2, generator=draw)
    on = given.to("mps").transpose(2, 3), grid.to("mps").transpose(1, 2)
    wanted = functional.grid_sample(given.transpose(2, 3), grid.transpose(1, 2), align_corners=False)
    torch.testing.assert_close(functional.grid_sample(*on, align_corners=False).cpu(), wanted, rtol=1e-4, atol=1e-5)
    assert kernels.ledger.operators["grid_sampler_2d"] == 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_adaptive_maxima_agree_but_where_windows_have_several_sizes(kernels: Dispatch, dtype: torch.dtype) -> None:
    """pytorch#190064: the windows of 2.13.0 are all of one size; PyTorch's samples have others since 2.15."""
    samples = compared(kernels, "nn.functional.adaptive_max_pool2d", dtype)
    several = re.compile(r"args=\(\(4, [45]\), (True|False)\)")
    assert [line for line in samples.differ if not several.search(line)] == []
    assert samples.ran == samples.taken > 0


def test_windows_that_move_by_one_element_are_mpsgraphs(kernels: Dispatch) -> None:
    given = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    found = functional.max_pool2d(given.to("mps"), 3, stride=1)
    assert torch.equal(found.cpu(), functional.max_pool2d(given, 3, stride=1))
    assert kernels.ledger.operators == {}
    assert kernels.ledger.reasons["max_pool2d", "MPSGraph on this release"] == 1


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_channels_last_and_transposed_inputs_are_read_where_they_lie(kernels: Dispatch, ceil_mode: bool) -> None:
    given = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    for layout in (given.contiguous(memory_format=torch.channels_last), given.transpose(2, 3)):
        on = torch.empty_strided(layout.shape, layout.stride(), device="mps").copy_(layout)
        found, places = functional.max_pool2d(on, 3, 2, 1, ceil_mode=ceil_mode, return_indices=True)
        wanted, right = functional.max_pool2d(layout, 3, 2, 1, ceil_mode=ceil_mode, return_indices=True)
        assert torch.equal(found.cpu(), wanted)
        assert torch.equal(places.cpu(), right)
        assert found.stride() == wanted.stride()
    assert kernels.ledger.operators["max_pool2d_with_indices"] == 2


def test_results_are_written_where_they_are_asked_for(kernels: Dispatch) -> None:
    given = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(2, 4, 3, 3, device="mps")
    torch.ops.aten.avg_pool2d.out(given.to("mps"), [2, 2], ceil_mode=True, out=out)
    assert kernels.ledger.operators["avg_pool2d.out"] == 1
    torch.testing.assert_close(out.cpu(), functional.avg_pool2d(given, 2))


def test_adaptive_pooling_of_sizes_that_do_not_divide_is_as_wrong_as_on_a_mac(kernels: Dispatch) -> None:
    # pytorch#190064: one stride for all windows, where adaptive windows differ.
    given = torch.arange(25.0).reshape(1, 1, 5, 5)
    found = functional.adaptive_max_pool2d(given.to("mps"), 3)
    assert found.flatten().tolist() == [12.0, 13.0, 14.0, 17.0, 18.0, 19.0, 22.0, 23.0, 24.0]
