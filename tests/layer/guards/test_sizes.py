"""What is too large for Metal's kernels: how it is cut, and that everything else goes to the device as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards.numerics import operators, products
from hf_mps.metal.device import machine
from hf_mps.metal.simulator import strictness
from tests import hazards

OURS = ("huge-products", "huge-cat", "embedding-grad", "conv-batch", "conv3d-layout")
GIB = 2**30


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((384, 4096, 64, 4096), 2),  # scores of 32 x 12 heads over 4,096 tokens
        ((384, 4096, 4096, 64), 2),  # their product with the values
        ((384, 64, 4096, 4096), 2),  # and from the other side
        ((1, 80_000, 64, 80_000), 2),  # one matrix that is too large by itself
        ((1, 1, 80_000, 80_000), 2),  # a single row by a large matrix
        ((1, 4, 2**31, 2), 2),
        ((384, 2048, 64, 2048), 1),
        ((2**16, 256, 64, 256), 1),  # exactly 2^32, whose last index fits
    ],
)
def test_no_part_of_a_product_is_too_large_and_all_of_it_is_there(shape: tuple[int, ...], count: int) -> None:
    batch, rows, inner, columns = shape
    cut = list(products.parts(*shape))
    assert len(cut) == count
    sizes = [tuple(each.stop - each.start for each in part) for part in cut]
    assert all(max(b * m * n, b * m * inner, b * inner * n) <= products.LIMIT for b, m, n in sizes)
    assert sum(b * m * n for b, m, n in sizes) == batch * rows * columns


def test_what_is_recognized_as_too_large_needs_no_memory_to_ask() -> None:
    meta: Callable[..., Any] = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    assert products._huge(0, meta(384, 4096, 64), meta(384, 64, 4096))
    assert products._huge(1, meta(1), meta(384, 4096, 4096), meta(384, 4096, 64))
    assert not products._huge(0, meta(384, 2048, 64), meta(384, 64, 2048))
    assert operators._huge([meta(2**30), meta(2**30 + 1)])
    assert not operators._huge([meta(2**30), meta(2**30)], 0)
    assert operators._huge([meta(4, 2**30)[:, -1]], -1), "a column of a huge tensor"
    assert not operators._huge([meta(3, 4)[:, :2]], 1)


@pytest.mark.parametrize(("gigabytes", "there"), [(8, False), (16, False), (18, True), (64, True)])
def test_products_are_watched_only_on_macs_that_can_hold_such_tensors(
    gigabytes: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = products.HugeProducts()
    monkeypatch.setattr(machine, "_overridden", replace(machine.present(), memory=gigabytes * GIB))
    try:
        guard.install(torch)
        assert bool(guard.arounds) is there
        assert guard.applies().value is there
    finally:
        guard.release()
    assert not guard.arounds


def test_where_the_cure_of_volumes_does_not_help_a_person_hears_of_it() -> None:
    with hazards.on("conv3d-layout"):
        guard = guards.get("conv3d-layout")
        guard.verdict()
        guard._helps = False  # type: ignore[attr-defined]
        with pytest.warns(guards.GuardNotice, match=r"next: update to macOS 26\.3 or later"):
            F.conv3d(torch.ones(1, 2, 3, 3, 3, device="mps"), torch.ones(1, 2, 2, 2, 2, device="mps"))


def test_volumes_with_channels_last_stay_so() -> None:
    volume, weight = torch.randn(1, 4, 3, 5, 5), torch.randn(2, 4, 1, 3, 3)
    with hazards.on("conv3d-layout"):
        last = volume.to("mps").contiguous(memory_format=torch.channels_last_3d)
        found = F.conv3d(last, weight.to("mps"))
        assert not guards.get("conv3d-layout").times
    torch.testing.assert_close(found.cpu(), F.conv3d(volume, weight))


def test_small_calls_go_to_the_device_and_no_guard_acts() -> None:
    one = torch.randn(2, 3, 4, device="mps", requires_grad=True)
    with hazards.on(*OURS), strictness.off():
        torch.cat([one, one]).sum().backward()
        torch.bmm(one, one.transpose(1, 2)).sum().backward()
        F.conv1d(one, torch.ones(1, 3, 2, device="mps", requires_grad=True)).sum().backward()
        F.embedding(torch.tensor([1, 2], device="mps"), one[0]).sum().backward()
        scaler, weight = torch.amp.GradScaler("mps"), torch.ones(2, device="mps", requires_grad=True)
        scaler.scale(weight.sum()).backward()
        scaler.step(torch.optim.SGD([weight], lr=1.0))
    assert not [each["name"] for each in guards.acted() if each["name"] in OURS]


def test_the_words_of_metals_refusals_are_the_devices() -> None:
    ids = torch.arange(300, device="mps")
    weight = torch.randn(300, 20, device="mps", requires_grad=True)
    words = "embedding_dense_backward_mps: tensor is larger than INT32_MAX"
    with hazards.on("embedding-grad"), guards.suspended("embedding-grad"), pytest.raises(RuntimeError, match=words):
        F.embedding(ids, weight).sum().backward()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        operators.together([torch.ones(2, 3, device="mps"), torch.ones(3, 2, device="mps")])


def test_a_fault_begins_elsewhere_only_for_a_while() -> None:
    one = torch.ones(2, 40, 40, device="mps")
    with strictness.on("huge-cat"), guards.suspended("huge-cat"):
        with strictness.beginning_at("huge-cat", 100):
            assert torch.cat([one, one]).sum().item() == 100
        assert torch.cat([one, one]).sum().item() == 6400
    with pytest.raises(UserError, match="conv-batch does not begin at a number of elements; huge-products, "):
        strictness.beginning_at("conv-batch", 3).__enter__()


def test_a_sum_that_is_too_long_by_itself_goes_to_the_device() -> None:
    one = torch.ones(1, 1, hazards.sizes.ELEMENTS + 1)
    with hazards.on("huge-products"):
        assert torch.bmm(one.to("mps"), one.transpose(1, 2).to("mps")).item() == one.numel()
        assert not guards.get("huge-products").times


def test_two_guards_at_one_operator_ask_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are too large for one fault and whose sums are too long for the other are right."""
    one, other = torch.randn(2, 20, 40_009), torch.randn(2, 40_009, 16)
    right = torch.bmm(one, other)
    with hazards.on("huge-products", "large-k"), strictness.beginning_at("huge-products", 10**6):
        monkeypatch.setattr(products, "LIMIT", 10**6)
        guards.get("large-k").verdict()
        used = torch.full((2**20,), 50.0, device="mps")
        del used
        found = torch.bmm(one.to("mps"), other.to("mps")).cpu()
        monkeypatch.undo()
    torch.testing.assert_close(found, right, rtol=1e-3, atol=0.1)
    assert guards.get("huge-products").times
    assert guards.get("large-k").times == 2, "once for each part"
