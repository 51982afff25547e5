"""The faults that raise nothing, as the simulated device has them: what is read, written and left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_mps.core.releases import torch_release
from hf_mps.metal.simulator import strictness

pytestmark = pytest.mark.usefixtures("mps", "bare")


@pytest.fixture
def silent() -> Iterator[None]:
    with strictness.off("late-indices"), strictness.on("silent-indices"):
        yield


def test_the_installed_release_has_what_upstream_says_of_it() -> None:
    here = torch_release() < (2, 14)
    assert ("silent-indices" in strictness.active()) is here
    assert ("dtype-copies" in strictness.active()) is here
    assert "row-bias" not in strictness.active(), "the default profile is no M1"


def test_rows_that_there_are_not_are_zeros_and_get_no_gradient(silent: None) -> None:
    table = nn.Embedding(3, 2, device="mps")
    found = table(torch.tensor([[0, 3], [-1, 2]], device="mps"))
    assert torch.equal(found[0, 1].cpu(), torch.zeros(2))
    assert torch.equal(found[1, 0].cpu(), torch.zeros(2))
    assert torch.equal(found[1, 1].cpu(), table.weight[2].cpu())
    found.sum().backward()
    assert table.weight.grad.cpu().tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_only_the_device_is_silent(device: str, silent: None) -> None:
    values, index = torch.ones(2, 3, device=device, requires_grad=True), torch.tensor([[0, 3]], device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="index 3 is out of bounds"):
            values.gather(1, index)
        return
    found = values.gather(1, index)
    assert found.tolist() == [[1, 0]]
    found.sum().backward()
    assert values.grad.tolist() == [[1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2, 2)])
def test_a_label_out_of_range_adds_nothing_and_counts_in_the_mean(shape: tuple[int, ...], silent: None) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    losses = F.cross_entropy(scores, labels, reduction="none")
    labels[1], labels[2] = 3, -100
    wanted = (losses[0].sum() + losses[3].sum()) / (losses.numel() * 3 / 4)
    there = scores.to("mps").requires_grad_()
    found = F.cross_entropy(there, labels.to("mps"))
    torch.testing.assert_close(found.cpu(), wanted)
    found.backward()
    assert there.grad[0].cpu().any()
    assert not there.grad[1:3].cpu().any()
    assert F.cross_entropy(there, labels.to("mps"), reduction="none")[1].cpu().abs().max() == 0


def test_all_labels_out_of_range_are_a_loss_of_zero(silent: None) -> None:
    assert F.cross_entropy(torch.randn(2, 3, device="mps"), torch.tensor([4, 5], device="mps")).item() == 0


def test_what_is_added_out_of_range_goes_nowhere(silent: None) -> None:
    index, ones = torch.tensor([0, 5], device="mps"), torch.ones(2, device="mps")
    assert torch.zeros(3, device="mps").index_add(0, index, ones).tolist() == [1, 0, 0]
    assert torch.zeros(3, device="mps").scatter_add(0, index, ones).tolist() == [1, 0, 0]


@pytest.mark.parametrize("wait", [torch.mps.synchronize, lambda: torch.ones(1, device="mps").cpu()])
def test_a_late_error_comes_once_when_somebody_waits(wait: object) -> None:
    assert callable(wait)
    with strictness.off("silent-indices"), strictness.on("late-indices"):
        F.embedding(torch.tensor([7], device="mps"), torch.ones(3, 1, device="mps"))
        with pytest.raises(torch.AcceleratorError, match="index 7 is out of bounds for dimension with size 3"):
            wait()
        wait()


def test_a_copy_that_narrows_overwrites_its_source() -> None:
    values = torch.arange(8.0) + 0.25
    with strictness.on("dtype-copies"):
        source = values.to("mps")
        into = torch.empty(10, dtype=torch.float16)[2:].copy_(source)
        assert torch.equal(into, values.half()), "which makes it easy to miss"
        after = source.cpu()
    # pytorch#189563 prints these: four halves in each pair of floats, the rest as it was.
    assert after.tolist()[4:] == values.tolist()[4:]
    assert after.tolist()[:2] == pytest.approx([0.0312996, 64.1259765])


def test_a_view_that_widens_is_read_as_far_in_as_it_lies() -> None:
    whole = torch.arange(1024, dtype=torch.float16)
    with strictness.on("dtype-copies"):
        there = whole.to("mps")
        assert there[256:320].to("cpu", torch.float32).tolist() == [0.0] * 64, "pytorch#194344: zeros from 256 on"
        found = there[64:128].to("cpu", torch.float32)
        assert found.tolist() == [*map(float, range(96, 128)), *[0.0] * 32]
        assert torch.equal(there.cpu(), whole)


def test_no_float64_goes_to_the_cpu_as_each_release_has_it() -> None:
    there, into = torch.ones(2, device="mps"), torch.full((2,), 7.0, dtype=torch.float64)
    with strictness.on("dtype-copies"), pytest.raises(TypeError, match="doesn't support float64"):
        there.to("cpu", torch.float64)
    with strictness.off("dtype-copies"), strictness.on("wide-copies"):
        assert into.copy_(there).tolist() == [7.0, 7.0], "torch 2.14.0 writes nothing"
