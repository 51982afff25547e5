"""Resizing and its gradients run Metal's kernels where the release has them, as the CPU computes."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional

from hf_mps.metal.kernels.rules import Dispatch
from hf_mps.metal.kernels.runtime import ALIGNMENT, _placed


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
