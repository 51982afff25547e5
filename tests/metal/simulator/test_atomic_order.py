"""Sums to which many threads add: the simulated device has an order of its own in each call, as the release has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.metal.device import profiles
from hf_mps.metal.simulator import strictness
from tests.hazards.device import faults_of

pytestmark = pytest.mark.usefixtures("mps", "bare")
WORDS = torch.arange(320).view(10, 32) % 8


def gradient(of: Callable[[Any], Any], *shape: int) -> Callable[[str], torch.Tensor]:
    """The gradient of what `of` makes of values of that shape, weighted so that its terms round."""
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(shape, generator=draw)

    def run(device: str) -> torch.Tensor:
        there = values.to(device).requires_grad_()
        found = of(there)
        factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(device)
        (grad,) = torch.autograd.grad((found * factors).sum(), there)
        return grad.cpu()

    return run


# What adds so -> the release of torch since which it does on Metal, and a gradient that shows it.
SUMS: dict[str, tuple[int, Callable[[str], torch.Tensor]]] = {
    "embedding": (13, gradient(lambda table: F.embedding(WORDS.to(table.device), table), 8, 16)),
    "bags of words": (13, gradient(lambda table: F.embedding_bag(WORDS.to(table.device), table, mode="sum"), 8, 16)),
    "rows by number": (8, gradient(lambda rows: rows[WORDS.to(rows.device)], 8, 16)),
    "index_select": (14, gradient(lambda rows: rows.index_select(0, WORDS.view(-1).to(rows.device)), 8, 16)),
    "gather": (13, gradient(lambda rows: rows.gather(1, WORDS.to(rows.device)), 10, 8)),
    "bicubic": (8, gradient(lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), 1, 2, 8, 8)),
    "trilinear": (8, gradient(lambda x: F.interpolate(x, scale_factor=3.0, mode="trilinear"), 1, 2, 4, 4, 4)),
    "max_pool3d": (10, gradient(lambda x: F.max_pool3d(x, 4, stride=1), 1, 2, 8, 8, 8)),
    "avg_pool3d": (10, gradient(lambda x: F.avg_pool3d(x, 3, stride=1), 1, 2, 6, 6, 6)),
    "grid_sample": (
        13,
        gradient(lambda x: F.grid_sample(x, x.new_zeros(1, 9, 9, 2) + 0.01, align_corners=False), 1, 2, 4, 4),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_last_bits_differ_from_call_to_call_and_no_more_than_those(name: str) -> None:
    since, run = SUMS[name]
    with strictness.off("atomic-order"):
        exact = run("mps")
        assert torch.equal(run("mps"), exact)
    torch.testing.assert_close(exact, run("cpu"))
    with strictness.on("atomic-order"):
        runs = [run("mps") for _ in range(4)]
    for each in runs:
        torch.testing.assert_close(each, exact)
    assert any(not torch.equal(each, runs[0]) for each in runs) is (torch_release() >= (2, since))


def test_whole_numbers_and_sums_without_repetition_are_exact() -> None:
    with strictness.on("atomic-order"):
        counts = [torch.zeros(8, dtype=torch.int64).to("mps").index_add(0, *_ones()) for _ in range(3)]
        assert all(each.tolist() == [40] * 8 for each in counts)
        once = gradient(lambda rows: rows[torch.arange(8).to(rows.device)], 8, 16)
        assert torch.equal(once("mps"), once("cpu"))


def test_which_of_several_values_stays_in_one_place_is_left_to_chance() -> None:
    def written() -> int:
        rows = torch.zeros(2, 1, dtype=torch.int64, device="mps")
        rows[torch.zeros(64, dtype=torch.int64, device="mps")] = torch.arange(64, device="mps").view(64, 1)
        return int(rows[0])

    with strictness.on("atomic-order"):
        assert len({written() for _ in range(8)}) > 1
        torch.use_deterministic_algorithms(True)
        try:
            assert {written() for _ in range(8)} == {63}
        finally:
            torch.use_deterministic_algorithms(False)
    with strictness.off("atomic-order"):
        assert {written() for _ in range(8)} == {63}


def _ones() -> tuple[torch.Tensor, torch.Tensor]:
    return WORDS.view(-1).to("mps"), torch.ones(320, dtype=torch.int64, device="mps")


def test_every_profile_adds_so_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_FAULTS", "")
    assert all("atomic-order" in faults_of(name, "2.13.0") for name in profiles.PROFILES)
    assert "large-k" in faults_of("m2-pro-16gb", "2.13.0")
    monkeypatch.setenv("HF_MPS_FAULTS", "-atomic-order, -large-k")
    assert "large-k-batched" in faults_of("m2-pro-16gb", "2.13.0")
    assert not {"atomic-order", "large-k"} & faults_of("m2-pro-16gb", "2.13.0")


def test_the_bias_of_one_row_is_lost_on_m1_with_macos_26_alone() -> None:
    macs = ("m1-16gb", "m1-macos26-16gb", "m4-16gb")
    assert ["row-bias" in faults_of(name, "2.13.0") for name in macs] == [False, True, False]


def test_a_fault_that_there_is_not_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_FAULTS", "-atomic-ordr")
    with pytest.raises(UserError, match=r"HF_MPS_FAULTS=-atomic-ordr: atomic-ordr is no fault; .*'atomic-order'"):
        profiles.requested()
