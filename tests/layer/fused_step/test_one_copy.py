"""A batch in one copy: every tensor is what stock makes of it, from memory that nobody else has, without a wait."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from hf_mps.layer import guards
from hf_mps.layer.fused_step.batch_parts import ONE_COPY
from hf_mps.metal import simulator
from hf_mps.metal.device import machine
from hf_mps.metal.simulator import strictness
from tests.layer.fused_step.conftest import Fused
from tests.layer.guards.test_batch_waits import encoding, send


def mixed() -> dict[str, Any]:
    return {
        "input_ids": torch.arange(6).view(2, 3),
        "attention_mask": torch.ones(2, 3, dtype=torch.bool),
        "pixel_values": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "labels": [torch.tensor([1, 0], dtype=torch.int32), (torch.tensor(3), "text", None)],
        "half": torch.ones(5, dtype=torch.float16),
    }


BATCHES: dict[str, Callable[[], Any]] = {
    "mixed": mixed,
    "encoding": encoding,
    "other mapping": lambda: UserDict(x=torch.ones(2), y=torch.zeros(3)),
    "gaps": lambda: {"x": torch.arange(12.0)[3:9:2], "y": torch.ones(1, 3).expand(4, 3), "z": torch.ones(2)},
    "transposed": lambda: [torch.arange(12.0).view(3, 4).t(), torch.ones(2)],
    "empty": lambda: (torch.ones(0, 3), torch.ones(2), torch.zeros(1)),
}


def shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist(), value.dtype, value.device, value.stride(), type(value), value.requires_grad
    if hasattr(value, "items"):
        return type(value), {name: shown(each) for name, each in value.items()}
    return (type(value), [shown(each) for each in value]) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_what_stock_makes_of_it(kind: str, fused: Fused) -> None:
    torch.manual_seed(0)
    expected = shown(send(BATCHES[kind]()))
    torch.manual_seed(0)
    with fused():
        there = send(BATCHES[kind]())
    assert shown(there) == expected


@pytest.mark.macos(15)
def test_it_is_one_copy_without_a_wait(fused: Fused) -> None:
    with fused(), simulator.counted() as counts:
        send(mixed())
    assert (counts.waits, counts.copies_in, counts.launches) == (0, 1, 0)


@pytest.mark.macos(15)
def test_a_trainers_own_move_is_one_copy_too(fused: Fused) -> None:
    class Held:
        args = type("Arguments", (), {"device": torch.device("mps")})()
        is_deepspeed_enabled = False
        _prepare_input = Trainer._prepare_input

    batch = {"x": torch.ones(2), "y": torch.zeros(2, 2)}
    with fused(), simulator.counted() as counts:
        there = Trainer._prepare_inputs(Held(), batch)  # type: ignore[arg-type]
    assert counts.copies_in == 1
    assert {each.device.type for each in there.values()} == {"mps"}


def test_a_tensor_that_a_batch_has_twice_becomes_two(fused: Fused) -> None:
    ids = torch.ones(2, 3)
    with fused():
        there = send({"input_ids": ids, "labels": ids})
    there["labels"].zero_()
    assert bool((there["input_ids"] == 1).all())


def test_what_is_done_to_one_leaves_the_others_alone(fused: Fused) -> None:
    """Autograd looks at versions: a label that is changed in place is no reason to distrust the ids."""
    weight = torch.nn.Embedding(4, 2).to("mps")
    with fused():
        there = send({"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([0, 1])})
    looked_up = weight(there["input_ids"])
    there["labels"].add_(1)
    looked_up.sum().backward()
    assert there["input_ids"].tolist() == [1, 2]


def test_batches_that_are_filled_into_the_same_memory_arrive_whole_while_work_is_queued(fused: Fused) -> None:
    host, other, weight = torch.zeros(4, 4), torch.zeros(2), torch.ones(4, 4, device="mps")
    firsts = []
    with fused(), strictness.on("queued-work"):
        for number in range(4):
            host.fill_(number)
            firsts.append((send({"x": host, "y": other})["x"] @ weight)[0, 0])
        assert [first.item() for first in firsts] == [0, 4, 8, 12]


@pytest.mark.macos(15)
def test_what_is_no_plain_tensor_goes_by_itself(fused: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    learned, there = torch.ones(2, requires_grad=True), torch.ones(2, device="mps")
    with fused(), simulator.counted() as counts:
        moved = send({"learned": learned, "there": there, "x": torch.ones(2), "y": torch.ones(2)})
    assert moved["there"] is there
    assert type(moved["learned"].grad_fn).__name__ == "ToCopyBackward0"
    assert counts.copies_in == 2
    monkeypatch.setattr("hf_mps.layer.guards.platform.batches.LARGEST", 20)
    with fused(), simulator.counted() as counts:
        send({"x": torch.ones(4), "y": torch.ones(4), "large": torch.ones(6)})
    assert counts.copies_in == 3, "a tensor that makes it too large stays outside"


def test_without_the_guard_everything_is_as_stock_has_it(fused: Fused) -> None:
    with guards.suspended("batch-waits"), fused(), simulator.counted() as counts:
        send(mixed())
        assert ONE_COPY.pays("mps") == ""
    assert (counts.copies_in, counts.waits) == (6, 6)


def test_an_older_macos_would_copy_each_tensor_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(machine.present(), macos="14.6")
    monkeypatch.setattr(machine, "present", lambda: old)
    assert ONE_COPY.pays("mps") == ""
