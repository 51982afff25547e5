"""Pooling and its gradients run the Metal kernels that PyTorch's host code takes, as the CPU computes."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.samples import compared

FLOATING = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_adaptive_maxima_agree_but_where_windows_have_several_sizes(kernels: Dispatch, dtype: torch.dtype) -> None:
    """pytorch#190064: the windows of 2.13.0 are all of one size; PyTorch's samples have others since 2.15."""
    samples = compared(kernels, "nn.functional.adaptive_max_pool2d", dtype)
    several = re.compile(r"args=\(\(4, [45]\), (True|False)\)")
    assert [line for line in samples.differ if not several.search(line)] == []
    assert samples.ran == samples.taken > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_averages_agree_and_are_partly_mpsgraphs(kernels: Dispatch, dtype: torch.dtype) -> None:
    samples = compared(kernels, "nn.functional.avg_pool2d", dtype)
    assert samples.differ == []
    assert 0 < samples.ran <= samples.taken


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
