"""Pads, sums and numbers that Metal misreads: which Macs do, which calls are cured, and what all others cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_mps.layer import guards
from hf_mps.metal.simulator import strictness
from tests import hazards

OURS = ("large-pad", "index-add-gaps", "lerp-weight", "scalar-views")


def test_calls_that_are_right_go_to_the_device_as_they_are() -> None:
    with hazards.on("large-pad", "index-add-gaps", "lerp-weight"):
        F.pad(torch.ones(1, 4, 256, 256, device="mps"), (0, 0, 0, 0, 2, 0))
        F.pad(torch.ones(1, 1, 2, 255, 255, device="mps"), (0, 0, 0, 0, 2, 0))
        F.pad(torch.ones(1, 1, 2, 256, 256, device="mps"), (0, 0, 0, 0, 2, 0, 1, 0))
        torch.zeros(3, 2, device="mps").index_add_(0, torch.tensor([1], device="mps"), torch.ones(1, 2, device="mps"))
        halves = torch.zeros(2, dtype=torch.float16, device="mps")
        for weight in (0.5, torch.tensor(0.5).half(), torch.full_like(halves, 0.5)):
            assert torch.lerp(halves, halves + 1, weight).tolist() == [0.5, 0.5]
    assert not [name for name in OURS[:3] if guards.get(name).times]


def test_more_than_three_pairs_of_numbers_are_padded_rightly_by_every_release() -> None:
    video = torch.arange(2.0 * 256 * 256).view(1, 1, 2, 256, 256)
    with strictness.on("large-pad"):
        found = F.pad(video.to("mps"), (0, 0, 0, 0, 2, 0, 1, 0))
    assert torch.equal(found.cpu(), F.pad(video, (0, 0, 0, 0, 2, 0, 1, 0)))


def test_a_number_within_a_cpu_tensor_is_read_at_its_beginning_up_to_torch_2_13() -> None:
    numbers, there = torch.tensor([2.0, 3.0, 5.0]), torch.ones(2, device="mps")
    with strictness.on("scalar-views"):
        assert [(there * each).tolist()[0] for each in numbers] == [2, 2, 2]
        assert (numbers[2] + there).tolist() == [3, 3]
        assert there.clone().sub_(numbers[1]).tolist() == [-1, -1]
        for read in (torch.clone, torch.Tensor.item, torch.Tensor.double, lambda each: each.to("mps")):
            assert [(there * read(each)).tolist()[0] for each in numbers] == [2, 3, 5]
    with strictness.off("scalar-views"):
        assert [(there * each).tolist()[0] for each in numbers] == [2, 3, 5]
