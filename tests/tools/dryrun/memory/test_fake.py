"""Fake tensors answer what a run would, where that is known: the numbers of the batch, and operators without a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hf_mps.finetune.smoke.fake import FakeScalars, needs_numbers
from hf_mps.tools.dryrun import metal_device

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


@contextmanager
def fakes(*real: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """The tensors as fake ones on the device, within the modes of a step."""
    metal_device()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = [mode.from_tensor(one) for one in real]
    with mode, FakeScalars(zip(made, real, strict=True)):
        yield [one.to("mps") for one in made]


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (lambda mask: bool((mask == 0).any()), True),
        (lambda mask: int(mask.sum(-1).max()), 3),
        (lambda mask: mask.sum(-1).tolist(), [3, 1]),
        (lambda mask: tuple(mask.nonzero().shape), (4, 2)),
        (lambda mask: tuple(mask[mask.bool()].shape), (4,)),
        (lambda mask: tuple(torch.ones(2, 4, 8, device="mps")[mask.bool()].shape), (4, 8)),
        (lambda mask: float(torch.ones(3, device="mps").mean()), 1.0),
        (lambda mask: bool(torch.rand([]) < 0.1), False),
    ],
    ids=[
        "truth value",
        "largest",
        "list",
        "places",
        "by a mask",
        "others by a mask",
        "a loss to log",
        "a dropped layer",
    ],
)
def test_what_is_computed_of_the_batch_alone_is_known(read: Callable[[Any], Any], answer: Any) -> None:
    with fakes(MASK) as (mask,):
        assert read(mask) == answer


@pytest.mark.parametrize(
    "operator",
    [
        lambda one, other: one * other,
        lambda one, other: one * 2,
        lambda one, other: one.mul_(other),
        lambda one, other: one.to(torch.bfloat16),
        lambda one, other: (one > 0) / 2,
        lambda one, other: one.transpose(0, 1)[1:],
        lambda one, other: one.unbind(0)[1],
        lambda one, other: torch.ops.aten._unsafe_view(one, (256, 64)),
        lambda one, other: torch.cat([one, other]),
        lambda one, other: one.max(dim=1).values,
        lambda one, other: torch.nn.functional.layer_norm(one, (256,)),
    ],
    ids=[
        "two",
        "a number",
        "in place",
        "a dtype",
        "whole numbers",
        "a view",
        "views",
        "a shape",
        "a list",
        "several",
        "a norm",
    ],
)
def test_a_result_that_was_made_before_is_like_the_operator_s(operator: Callable[[Any, Any], Any]) -> None:
    first, second = torch.randn(64, 256), torch.randn(64, 256)
    real = operator(first, second)
    with fakes(first, second) as made:
        made = [one.exp() for one in made]  # whose values are not known
        found = [operator(*made) for _ in range(4)]
    for one in found:
        assert (one.shape, one.stride(), one.dtype, one.device.type) == (real.shape, real.stride(), real.dtype, "mps")
        assert one.storage_offset() == real.storage_offset()
    memory = {one.untyped_storage()._cdata for one in (*found, *made)}
    shares = real.untyped_storage()._cdata in (first.untyped_storage()._cdata, second.untyped_storage()._cdata)
    assert len(memory) == (2 if shares else 6)


def test_zeros_of_a_given_size_have_no_memory_however_small_the_tensor_beside_it() -> None:
    with fakes(MASK) as (mask,):
        assert mask.new_zeros(2, 3).tolist() == [[0] * 3] * 2
        assert mask.new_zeros(2**40).shape == (2**40,)  # 8 TiB
        assert mask.float().new_full((2**40, 4), 1.0).shape == (2**40, 4)


def test_what_depends_on_the_weights_is_not() -> None:
    with fakes(MASK) as (mask,):
        scores = torch.empty(2, 4, device="mps").uniform_()
        with pytest.raises(DataDependentOutputException) as unknown:
            (scores.argmax(-1) * mask[:, 0]).tolist()
        assert needs_numbers(unknown.value)


def test_what_is_written_over_is_no_longer_known() -> None:
    with fakes(MASK) as (mask,):
        part = mask[0]
        mask.copy_(torch.empty(2, 4, device="mps").uniform_().to(torch.int64))
        with pytest.raises(DataDependentOutputException) as unknown:
            part.tolist()
        assert needs_numbers(unknown.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.randn(12, 16), torch.randn(3, 8, 16).transpose(1, 2)),
        (torch.randn(12, 16), torch.randn(3, 5, 16).transpose(1, 2)),
        (torch.randn(12, 16).t(), torch.randn(12, 8)),
    ],
    ids=["rows by weights", "an odd width", "the gradient of the weights"],
)
def test_a_product_in_groups_has_the_shape_that_the_device_gives_it(first: torch.Tensor, second: torch.Tensor) -> None:
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    real = torch._grouped_mm(first.to("mps"), second.to("mps"), offs=ends.to("mps"))
    with fakes(first, second, ends) as made:
        found = torch._grouped_mm(*made[:2], offs=made[2])
        assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


def test_the_alignments_of_a_ctc_loss_have_the_shape_that_it_gives_them() -> None:
    scores = torch.randn(20, 2, 6).log_softmax(-1)
    labels, times, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([20, 18]), torch.tensor([3, 2])
    real = torch._ctc_loss(scores, labels, times, lengths)
    with fakes(scores, labels, times, lengths) as made:
        found = torch._ctc_loss(*made)
        assert [one.shape for one in found] == [one.shape for one in real]


def test_a_module_that_is_moved_within_the_step_is_no_fault_of_the_model() -> None:
    """D-FINE's loss makes a module and moves it, and PyTorch exchanges no fake parameter in place."""
    moved = torch.nn.Module()
    with fakes(MASK) as (mask,):
        moved.up = torch.nn.Parameter(mask.float(), requires_grad=False)
        with pytest.raises(RuntimeError, match="Couldn't swap") as raised:
            moved.to("cpu")
    assert needs_numbers(raised.value)
