"""What the simulated device counts: launches, copies, and the waits that a person mends by the line they come from."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.core.patching import Around
from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.metal import simulator

pytestmark = pytest.mark.usefixtures("mps")

Call = Callable[[torch.Tensor], object]

# By the sources of torch 2.13: Copy.mm, Scalar.mm, Indexing.mm, MPSEvent.mm and others (native/work.cpp).
WAITS: dict[str, tuple[Call, int]] = {
    "item": (lambda x: x[0, 0].item(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "truth": (lambda x: bool(x.any()), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "a copy into a tensor of the host": (lambda x: torch.empty(2, 3).copy_(x), 1),
    "a tensor made of numbers": (lambda x: torch.tensor([1, 2], device="mps"), 1),
    "a copy from the host": (lambda x: torch.ones(2).to("mps"), 1),
    "a copy from the host to a transposed tensor": (lambda x: x.t().copy_(torch.ones(3, 2), non_blocking=True), 1),
    "synchronize": (lambda x: torch.mps.synchronize(), 1),
    "accelerator's synchronize": (lambda x: torch.accelerator.synchronize(), 1),
    "empty_cache": (lambda x: torch.mps.empty_cache(), 1),
    "an event": (lambda x: recorded().synchronize(), 1),
    "the time between events": (lambda x: recorded().elapsed_time(recorded()), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "where": (lambda x: torch.where(x > 0), 1),
    "a mask as an index": (lambda x: x[x > 0], 1),
    # From 2.15 on a masked_fill, as on CUDA: pytorch PR 195020.
    "a mask that is assigned a number": (lambda x: x.__setitem__(x > 0, 1.0), int(torch_release() < (2, 15))),
    "masked_select": (lambda x: x.masked_select(x > 0), 1),
    "unique": (lambda x: x.unique(), 1),
    "equal": (lambda x: torch.equal(x, x.clone()), 1),
    "multinomial": (lambda x: x.multinomial(1), 2),
    "repeats that only the device knows": (lambda x: x.repeat_interleave(torch.ones_like(x[0]).long(), 1), 2),
    "bincount": (lambda x: x.flatten().long().bincount(), 2),
    "histc reads each edge": (lambda x: x.histc(4, 0, 1), 5),
    "a fill with a number of the device": (lambda x: x.fill_(x[0, 0]), 1),
}
RUNS_ON: dict[str, Call] = {
    "arithmetic": lambda x: (x + 1).mul_(x).sum(),
    "a product": lambda x: x @ x.t(),
    "views": lambda x: x.view(3, 2).t()[1:].unsqueeze(0).expand(4, 1, 3),
    "factories": lambda x: (
        torch.zeros(4, device="mps"),
        torch.full((2,), 7, device="mps"),
        torch.empty(3, device="mps"),
    ),
    "a fill with a number": lambda x: x.fill_(3),
    "a mask that is filled": lambda x: x.masked_fill_(x > 0, 1),
    "a mask of values": lambda x: torch.where(x > 0, x, 0),
    "indices of the device": lambda x: x[torch.zeros(1, dtype=torch.long, device="mps")],
    "random numbers": lambda x: (torch.rand(3, device="mps"), torch.nn.functional.dropout(x)),
    "a copy on the device": lambda x: x.clone(),
    "another dtype": lambda x: x.half(),
    "a copy from the host that need not wait": lambda x: torch.ones(2).to("mps", non_blocking=True),
    "a copy to the host that need not wait": lambda x: x.to("cpu", non_blocking=True),
    "an event that is only recorded": lambda x: recorded().wait(),
    "the state of random numbers": lambda x: torch.mps.set_rng_state(torch.mps.get_rng_state()),
    "repeats of a known length": lambda x: x.repeat_interleave(2, 1),
    "nothing at all": lambda x: (torch.empty(0).to("mps"), x[:0].cpu()),
}


def recorded() -> torch.mps.Event:
    event = torch.mps.Event(enable_timing=True)
    event.record()
    return event


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_program_stand_still(name: str) -> None:
    call, waits = WAITS[name]
    x = torch.ones(2, 3, device="mps")
    with guards.suspended(), simulator.counted() as counts:
        call(x)
    assert counts.waits == waits


@pytest.mark.parametrize("name", RUNS_ON)
def test_what_does_not(name: str) -> None:
    x = torch.ones(2, 3, device="mps")
    with guards.suspended(), simulator.counted() as counts:
        RUNS_ON[name](x)
    assert counts.waits == 0


def test_an_operator_is_a_launch_and_a_view_is_none() -> None:
    x = torch.ones(2, 3, device="mps")
    layer = torch.nn.Linear(3, 4).to("mps")
    with simulator.counted() as counts:
        _ = x.view(6).reshape(3, 2).t()[1:].unsqueeze(0).expand(2, 1, 3).permute(2, 1, 0), x.detach(), x.shape
        torch.empty(3, device="mps")
        assert counts.launches == 0
        (x + 1).mul_(2)
        assert counts.launches == 2
        loss = layer(x).sum()
        assert counts.launches == 4
    assert counts.launches == 4
    loss.backward()
    assert counts.launches == 4, "it counts no further"


def test_copies_are_counted_with_their_bytes() -> None:
    with simulator.counted() as counts:
        x = torch.ones(5, dtype=torch.float16).to("mps")
        x.clone()
        x.float().cpu()
        x[0].item()
    found = counts.figures
    assert (found.copies_in, found.bytes_in) == (1, 10)
    assert (found.copies_out, found.bytes_out) == (2, 22)


def test_a_wait_names_the_line_that_waits_also_through_the_layers_wrappers() -> None:
    with simulator.counted(places=True) as counts:
        torch.ones(2).to("mps").sum().item()
        torch.nn.Linear(2, 2).to("mps")
    first, second = [str(place) for place in counts.places][:2]
    assert "test_counters.py:" in first
    assert first.endswith("_through_the_layers_wrappers: copy to the device")
    assert second.endswith("_through_the_layers_wrappers: item")
    assert sum(counts.places.values()) == counts.waits == 4
    assert counts.places.most_common(1)[0][1] == 2, "weight and bias are moved by one line"


def test_a_wait_of_the_layers_own_is_the_layers() -> None:
    class Owner:
        on = True

    def reads(stock: Callable[..., object], x: torch.Tensor) -> object:
        x.sum().item()
        return stock(x)

    with simulator.counted(places=True) as counts:
        Around(Owner(), "Tensor.cpu", torch.Tensor.cpu, reads).replacement()(torch.ones(2, device="mps"))
    told = {place.why: place.where.split()[-1] for place in counts.places}
    assert told == {"item": "reads", "copy to the host": "test_a_wait_of_the_layers_own_is_the_layers"}


def test_a_wait_in_a_backward_pass_is_told_from_the_programs_own() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, *grads: torch.Tensor) -> torch.Tensor:
            grads[0].sum().item()
            return grads[0]

    x = torch.ones(2, device="mps", requires_grad=True)
    losses = Reads.apply(x).sum(), x.masked_select(x > 0).sum()
    with simulator.counted(places=True) as counts:
        for loss in losses:
            loss.backward()
    found = {place.why: place.where.split()[-1] for place in counts.places}
    assert found["item"] == "backward", "Python's own"
    assert found["aten::masked_scatter_"] == "autograd", "no Python called it"


def test_every_thread_is_counted() -> None:
    x = torch.ones(2, device="mps")
    with simulator.counted() as counts:
        threads = [threading.Thread(target=lambda: [x.sum().item() for _ in range(50)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (counts.launches, counts.waits) == (150, 150)


def test_one_counts_by_place_at_a_time_and_counts_may_nest() -> None:
    with simulator.counted(places=True) as outer:
        with simulator.counted() as inner:
            torch.mps.synchronize()
        with pytest.raises(UserError, match="by place already"), simulator.counted(places=True):
            pass
        torch.mps.synchronize()
    assert (outer.waits, inner.waits) == (2, 1)
    torch.mps.synchronize()
    assert sum(outer.places.values()) == 2, "nobody listens any longer"
