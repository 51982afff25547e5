"""A copy waits only where it gives other values if it does not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mps.layer import guards
from hf_mps.metal.simulator import strictness


class Copies(TorchDispatchMode):
    """For each copy to another device what it was asked: whether it need not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.unwaiting: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy":
            self.unwaiting.append(bool(kwargs.get("non_blocking")))
        elif func.overloadpacket.__name__ == "copy_":
            self.unwaiting.append(bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def test_a_copy_to_the_device_is_made_as_it_was_asked_for() -> None:
    with Copies() as copies:
        torch.ones(2).to("mps", non_blocking=True)
        torch.empty(2, device="mps").copy_(torch.ones(2), non_blocking=True)
    assert copies.unwaiting == [True, True]
    assert not guards.get("non-blocking").times


def test_a_source_that_the_script_writes_to_too_early_is_read_as_it_is_then() -> None:
    source = torch.ones(4)
    with strictness.on("late-copies"):
        there = source.to("mps", non_blocking=True)
        source.zero_()
        assert there.tolist() == [0.0] * 4, "as with pinned memory on CUDA: a wait for each copy would be the price"
