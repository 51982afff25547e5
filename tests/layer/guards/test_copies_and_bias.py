"""Copies that also change the dtype and the bias of a linear layer: every form of the call, and what stays stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from inline_snapshot import snapshot
from torch import Tensor

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.guards.numerics import layouts
from hf_mps.metal.simulator import strictness
from tests.hazards import device

VALUES = torch.arange(64.0).view(8, 8) / 8
of_the_release = pytest.mark.skipif(torch_release() >= (2, 14), reason="from 2.14 on these guards put nothing anywhere")

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "device, dtype": lambda there: there.to("cpu", torch.float16),
    "by name": lambda there: there.to(dtype=torch.bfloat16, device=torch.device("cpu")),
    "other": lambda there: there.to(torch.empty(1, dtype=torch.int64)),
    "other by name": lambda there: there.to(tensor=torch.empty(1, dtype=torch.float16)),
    "not waiting": lambda there: there.to("cpu", torch.float16, True),
    "with a layout": lambda there: there.to("cpu", torch.float16, memory_format=torch.contiguous_format),
    "float64": lambda there: there.to("cpu", torch.float64),
    "a view": lambda there: there[3:, 1:].to("cpu", torch.float64),
    "into a part": lambda there: torch.zeros(9, 8, dtype=torch.float16)[1:].copy_(there),
    "not waiting, into": lambda there: torch.zeros(8, 8, dtype=torch.int32).copy_(there, non_blocking=True),
}


@of_the_release
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_cpus_values_and_leaves_the_source(form: str) -> None:
    there = VALUES.to("mps")
    found = FORMS[form](there)
    assert found.device.type == "cpu"
    assert torch.equal(found, FORMS[form](VALUES))
    assert torch.equal(there.cpu(), VALUES)
    assert guards.get("dtype-copies").times == 1


class Told(Tensor):
    """A tensor whose class answers the functions that it knows, as torchao's quantized ones do, and no others."""

    told: ClassVar[list[Any]] = []
    KNOWN = (Tensor.to, Tensor.copy_)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.told.append((func, len(args), kwargs))
        if func not in cls.KNOWN:
            raise NotImplementedError(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_class_of_tensors_is_told_of_the_calls_that_the_script_makes_and_of_nothing_else() -> None:
    there = VALUES.to("mps").as_subclass(Told)
    Told.told.clear()
    half = there.to("cpu", torch.float16, non_blocking=True)
    kept = torch.zeros(8, 8, dtype=torch.float16, device="cpu").copy_(there)
    plain = torch.zeros(8, 8, device="cpu").copy_(there, non_blocking=True)
    assert Told.told == [
        (Tensor.to, 3, {"non_blocking": True}),
        (Tensor.copy_, 2, None),
        (Tensor.copy_, 2, {"non_blocking": True}),
    ]
    for found in (half, kept, plain):
        assert torch.equal(found.as_subclass(Tensor).float(), VALUES)
    times = [2, 1] if torch_release() < (2, 14) else [0, 2]  # a newer torch copies into another dtype rightly by itself
    assert [guards.get(name).times for name in ("dtype-copies", "non-blocking")] == times


def test_gradients_flow_through_a_copy_in_two_steps() -> None:
    there = VALUES.to("mps").requires_grad_()
    there.to("cpu", torch.float64).square().sum().backward()
    assert torch.equal(there.grad.cpu(), 2 * VALUES)


@pytest.mark.parametrize(
    "call",
    [
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there.to("cpu", torch.float32),
        lambda there: there.to(torch.float16),
        lambda there: there.copy_(VALUES.half()),
        lambda there: VALUES.to("mps", torch.float16),
    ],
)
def test_other_copies_are_stocks(call: Callable[[Tensor], Any]) -> None:
    call(VALUES.to("mps"))
    assert not guards.get("dtype-copies").times


@pytest.mark.parametrize(
    ("release", "wrong"), [("2.13.0", {"half", "float64"}), ("2.14.0", {"float64"}), ("2.14.1", set())]
)
def test_each_release_has_what_upstream_says_of_it(release: str, wrong: set[str]) -> None:
    guard = layouts.DtypeCopies()
    kinds = {"half": torch.float16, "float64": torch.float64}
    with device.mac(torch=release):
        assert guard.applies().value is bool(wrong)
        assert {name for name, kind in kinds.items() if guard._wrong(torch.float32, kind)} == wrong


@of_the_release
@pytest.mark.macos(15)
def test_the_trial_tells_which_of_the_two_faults_is_there() -> None:
    guard = guards.get("linear-bias")
    with strictness.off("row-bias", "many-rows-bias"):
        assert guard.applies().reason == snapshot(
            "tried on the device: the bias is right for one row and for 65,537 matrices"
        )
    with strictness.on("row-bias"), strictness.off("many-rows-bias"):
        assert guard.applies().reason == snapshot("tried on the device: the bias is wrong for one row")
    with strictness.on("row-bias", "many-rows-bias"):
        assert guard.applies().reason.endswith("wrong for one row and for 65,537 matrices")


@of_the_release
@pytest.mark.macos(15)
def test_a_layer_without_the_fault_goes_to_the_devices_own_kernel() -> None:
    rows, weight, bias = (torch.randn(size, device="mps") for size in ((4, 8), (3, 8), (3,)))
    with strictness.on("row-bias"):
        F.linear(rows, weight, bias)
        F.linear(rows[:1], weight)
        assert not guards.get("linear-bias").times
        F.linear(rows[:1], weight, bias)
    assert guards.get("linear-bias").times == 1


@of_the_release
@pytest.mark.macos(15)
def test_a_long_row_is_split_and_keeps_its_bias() -> None:
    """Two guards at one kernel: the sums of `large-k`, one row in each matrix, and a bias."""
    draw = torch.Generator().manual_seed(3)
    rows, weight, bias = (torch.randn(size, generator=draw) for size in ((20, 1, 40_009), (16, 40_009), (16,)))
    right = F.linear(rows, weight, bias)
    with strictness.on("row-bias", "large-k"):
        guards.get("large-k").verdict()  # its trial sums over as much
        used = torch.full((2**20,), 50.0, device="mps")
        del used
        strictness.take_longest_sum()
        found = F.linear(rows.to("mps"), weight.to("mps"), bias.to("mps"))
        assert strictness.take_longest_sum() <= 32766
    torch.testing.assert_close(found.cpu(), right, rtol=1e-3, atol=1e-2)
    assert guards.get("linear-bias").times == guards.get("large-k").times == 1
