"""Copies that nobody waits for: what they read, and when they are there, as Copy.mm of each release has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hf_mps.layer import guards
from hf_mps.metal import simulator
from hf_mps.metal.simulator import strictness

pytestmark = pytest.mark.usefixtures("mps")

ONES = [1.0, 1.0, 1.0]


@pytest.fixture(autouse=True)
def _bare() -> Iterator[None]:
    """The device without its guards, and nothing left in its queue."""
    with guards.suspended():
        yield
    torch.mps.synchronize()


@pytest.fixture
def held() -> Iterator[None]:
    with strictness.on("late-copies"):
        yield


def test_the_device_has_them_on_every_release() -> None:
    assert "late-copies" in strictness.active()


def test_what_is_written_after_the_call_is_what_arrives(held: None) -> None:
    source = torch.ones(3)
    there = source.to("mps", non_blocking=True)
    source.fill_(7)
    assert (there + 0).tolist() == [7.0, 7.0, 7.0]
    source.fill_(9)
    assert there.tolist() == [7.0, 7.0, 7.0], "it is there now"


@pytest.mark.parametrize("wait", [torch.mps.synchronize, lambda: torch.ones(1, device="mps").item()])
def test_what_is_written_after_a_wait_is_not(wait: Callable[[], object], held: None) -> None:
    source = torch.ones(3)
    there = torch.zeros(3, device="mps").copy_(source, non_blocking=True)
    wait()
    source.fill_(7)
    assert there.tolist() == ONES


def test_a_copy_that_waits_reads_at_once(held: None) -> None:
    source = torch.ones(3)
    there = source.to("mps")
    source.fill_(7)
    assert there.tolist() == ONES


def test_a_source_that_is_freed_is_held(held: None) -> None:
    assert torch.full((3,), 1.0).to("mps", non_blocking=True).tolist() == ONES


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_another_dtype_is_made_on_the_host_first(dtype: torch.dtype, held: None) -> None:
    source = torch.ones(3)
    there = source.to("mps", dtype, non_blocking=True)
    source.fill_(7)
    assert there.tolist() == ONES, "the copy reads what was made, not the source"


def test_what_comes_to_the_host_is_there_after_a_wait(held: None) -> None:
    there = torch.ones(3, device="mps")
    copies = there.to("cpu", non_blocking=True), torch.full((3,), 5.0).copy_(there, non_blocking=True)
    there.fill_(7)
    assert [each.tolist() for each in copies] != [ONES, ONES]
    torch.mps.synchronize()
    assert [each.tolist() for each in copies] == [ONES, ONES], "the values of the time of the call"


def test_a_target_that_lies_otherwise_gets_nothing_ever(held: None) -> None:
    there = torch.arange(6.0, device="mps").view(2, 3)
    into = torch.empty(3, 2).t().copy_(there, non_blocking=True)
    torch.mps.synchronize()
    assert not torch.equal(into, there.cpu()), "Copy.mm copies on, on the host, what has not arrived yet"
    assert torch.equal(torch.empty(3, 2).t().copy_(there), there.cpu())


def test_a_target_that_is_freed_meanwhile_harms_nobody(held: None) -> None:
    there = torch.ones(1000, device="mps")
    for _ in range(20):
        there.to("cpu", non_blocking=True)
    torch.mps.synchronize()
    assert there.sum().item() == 1000


def test_a_round_trip_arrives(held: None) -> None:
    home = torch.ones(3, device="mps").to("cpu", non_blocking=True)
    assert home.to("mps", non_blocking=True).add(1).tolist() == [2.0, 2.0, 2.0], "one queue, in order"


def test_two_copies_into_one_tensor_come_in_order(held: None) -> None:
    there = torch.zeros(4, device="mps")
    there[:2].copy_(torch.ones(2), non_blocking=True)
    there.copy_(torch.full((4,), 2.0), non_blocking=True)
    there[3:].copy_(torch.full((1,), 3.0))
    assert there.tolist() == [2.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * 1,
        lambda x: torch.cat([x, x])[:3],
        lambda x: x.view(3, 1).t()[0].clone(),
        lambda x: torch.nn.functional.conv1d(x.view(1, 1, 3), torch.ones(1, 1, 1, device="mps")).view(3),
        lambda x: torch.nn.functional.linear(x, torch.eye(3, device="mps")),
        lambda x: x.resize_(6).resize_(3),
        lambda x: torch.zeros(3, device="mps").copy_(x),
        lambda x: x.mul_(1),
        lambda x: torch._foreach_mul([x], 1)[0],
    ],
)
def test_whatever_comes_after_it_in_the_queue_sees_it(read: Callable[[torch.Tensor], torch.Tensor], held: None) -> None:
    source = torch.ones(3)
    assert read(source.to("mps", non_blocking=True)).tolist() == ONES


def test_a_copy_in_the_queue_is_no_wait(held: None) -> None:
    source = torch.ones(3)
    with simulator.counted() as counts:
        there = source.to("mps", non_blocking=True) + 1
        assert counts.waits == 0
        there.cpu()
    assert (counts.waits, counts.copies_in, counts.copies_out) == (1, 1, 1)
