"""The fixture `metal_work`: what a block gives the device, held to limits."""

from __future__ import annotations

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.metal.simulator import Counted, build, counted
from hf_mps.metal.simulator.counters import Work

pytestmark = pytest.mark.usefixtures("mps")


def test_a_block_is_counted_and_the_next_one_anew(metal_work: Work) -> None:
    x = torch.ones(2, 3, device="mps")
    with metal_work:
        (x @ x.t()).add_(1).cpu()
    counts = metal_work.launches, metal_work.waits, metal_work.copies_in, metal_work.copies_out
    assert counts == (2, 1, 0, 1)
    assert metal_work.operators == {"aten::mm": 1, "aten::add_.Tensor": 1}
    assert [place.split(":")[-1] for place in metal_work.places] == [" copy to the host"]
    x.exp()
    assert metal_work.launches == 2, "what comes between is nobody's"
    with metal_work:
        torch.ones(2).to("mps")
    assert (metal_work.launches, metal_work.copies_in, metal_work.operators) == (0, 1, {})


def test_a_limit_that_is_kept_says_nothing_and_a_broken_one_says_what_of(metal_work: Work) -> None:
    x = torch.ones(2, device="mps")
    with metal_work:
        for _ in range(3):
            x = x + 1
        (x * 2).item() if x.numel() == 1 else x.sum().item()
    metal_work.at_most(launches=4, waits=1, copies_out=1)
    with pytest.raises(AssertionError) as failed:
        metal_work.at_most(launches=3, waits=0, copies_out=1)
    first, *rest, last = str(failed.value).splitlines()
    assert first == "launches: 4, and 3 allowed"
    assert rest == ["       3  aten::add.Tensor", "       1  aten::sum.dim_IntList", "waits: 1, and 0 allowed"]
    assert last.endswith("test_a_limit_that_is_kept_says_nothing_and_a_broken_one_says_what_of: item")


def test_of_many_operators_the_most_frequent_are_named(metal_work: Work) -> None:
    x = torch.ones(2, device="mps")
    calls = ("exp", "sin", "cos", "neg", "sqrt", "abs", "tanh", "sigmoid", "erf", "relu")
    with metal_work:
        for name in calls:
            getattr(torch, name)(x)
    with pytest.raises(AssertionError, match=r"       2  others$"):
        metal_work.at_most(launches=0)


def test_a_count_that_there_is_not_is_refused(metal_work: Work) -> None:
    with pytest.raises(RuntimeError, match="nothing was counted yet"):
        metal_work.at_most(waits=0)
    with metal_work:
        pass
    with pytest.raises(TypeError, match=r"at_most\(syncs=\): there is no such count; allowed: launches, blits"):
        metal_work.at_most(syncs=0)


def test_a_block_within_a_count_by_place_is_refused_and_leaves_nothing_open(metal_work: Work) -> None:
    with counted(places=True), pytest.raises(UserError, match="by place already"), metal_work:
        pass
    with metal_work:
        torch.mps.synchronize()
    assert metal_work.waits == 1


def test_calls_are_recorded_no_longer_than_somebody_counts(metal_work: Work) -> None:
    metal = build.running("a device")
    with counted() as counts:
        torch.ones(2, device="mps").exp()
    with metal_work:
        pass
    assert counts.operators == {"aten::fill_.Scalar": 1, "aten::exp": 1}
    assert not metal_work.operators
    assert metal.recording() is False
    assert metal.calls_recorded() == 0
    forgotten = Counted()
    assert metal.recording()
    del forgotten
    assert not metal.recording()
