"""Scripts' optimizers are fused, and step counters counted at once: the weights are stock's to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_mps.layer.fused_step import switch
from hf_mps.layer.fused_step.optimizer import FUSED_OPTIMIZER
from hf_mps.metal import simulator
from tests.layer.fused_step.conftest import Fused

SHAPES = ((30, 20), (64,), (3, 5), (1,), (7, 2, 4), (64,))
OPTIMIZERS = {
    "adamw": lambda weights, **said: torch.optim.AdamW(weights, lr=1e-2, **said),
    "adam": lambda weights, **said: torch.optim.Adam(weights, lr=1e-2, amsgrad=True, **said),
    "sgd": lambda weights, **said: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=0.1, **said),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is on as HF_MPS_FUSED_STEP=1 has it, until the test is over."""
    for part in switch.parts():
        monkeypatch.setattr(part, "devices", frozenset())
        monkeypatch.setattr(part, "by_script", False)
    switch.for_scripts()
    for part in switch.parts():
        monkeypatch.setattr(part, "line", "")


def weights() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw).to("mps")) for shape in SHAPES]


def train(optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.randn(weight.shape, generator=draw).to("mps")
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_a_word_is_fused_and_trains_alike(script: None, name: str) -> None:
    ours, stock = weights(), weights()
    train(mine := OPTIMIZERS[name](ours), 5)
    train(theirs := OPTIMIZERS[name](stock, foreach=False), 5)
    assert [group["fused"] for group in (*mine.param_groups, *theirs.param_groups)] == [True, None]
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("said", [{"fused": False}, {"foreach": False}, {"capturable": True}, {"differentiable": True}])
def test_who_chose_a_way_keeps_it(script: None, said: dict[str, bool]) -> None:
    ours = weights()
    for weight in ours:
        weight.grad = torch.ones_like(weight)
    before = OPTIMIZERS["adamw"](ours, **said)
    chosen = before.param_groups[0]["fused"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FUSED_OPTIMIZER, "acts", lambda: pytest.fail("it acted"))
        FUSED_OPTIMIZER._fuse(before)
    assert before.param_groups[0]["fused"] is chosen


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float16, None), (torch.bfloat16, True)])
def test_float16_weights_step_as_stock_has_them(script: None, dtype: torch.dtype, fused: bool | None) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype, device="mps"))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is fused


def test_on_the_cpu_nothing_changes(script: None) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None


def test_a_run_goes_on_from_an_unfused_ones_checkpoint(script: None) -> None:
    stock = weights()
    train(theirs := OPTIMIZERS["adamw"](stock, foreach=False), 3)
    ours = weights()
    mine = OPTIMIZERS["adamw"](ours)
    stored = copy.deepcopy(theirs.state_dict())
    stored["param_groups"][0]["foreach"] = None
    mine.load_state_dict(stored)
    for one, other in zip(ours, stock, strict=True):
        one.data.copy_(other.data)
    train(mine, 3, first=3)
    train(theirs, 3, first=3)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert {float(state["step"]) for state in mine.state.values()} == {6.0}


def test_counters_are_counted_at_once_and_go_on_from_a_checkpoint(fused: Fused) -> None:
    ours = weights()
    optimizer = torch.optim.AdamW(ours, fused=True)
    with fused():
        train(optimizer, 2)
        with simulator.counted() as now:
            torch._foreach_add_([state["step"] for state in optimizer.state.values()], 1)
        assert (now.launches, now.waits) == (1, 0)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, 1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    assert all(state["step"].shape == () for state in optimizer.state.values())


def test_a_step_that_is_traced_without_values_says_nothing_more(run_python: Callable[..., Any]) -> None:
    program = (
        "import torch; from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, device='mps') for _ in range(4)))\n"
        "    model(torch.ones(2, 4, device='mps')).sum().backward()\n"
        "    torch.optim.AdamW(model.parameters(), fused=True).step()\n"
    )
    done = run_python("-c", program, env={"HF_MPS_SIMULATE": "1", "HF_MPS_FUSED_STEP": "1"})
    assert [line for line in done.stderr.splitlines() if "HF_MPS_FUSED_STEP=1: " not in line] == []


@pytest.mark.parametrize("overflows", [False, True])
def test_a_step_that_overflows_is_taken_back(fused: Fused, overflows: bool) -> None:
    def run() -> tuple[list[Any], Any]:
        ours = weights()
        optimizer: Any = torch.optim.AdamW(ours, fused=True)
        scaler = torch.amp.GradScaler("mps", init_scale=4.0)
        for weight in ours:
            weight.grad = torch.full_like(weight, float("inf") if overflows else 4.0)
            scaler.scale(torch.ones((), device="mps"))
        scaler.step(optimizer)
        scaler.update()
        return ours, optimizer

    stock, theirs = run()
    with fused():
        ours, mine = run()
    assert all(map(torch.equal, ours, stock))
    counted: Callable[[Any], set[float]] = lambda of: {float(state["step"]) for state in of.state.values()}  # noqa: E731
    assert counted(mine) == counted(theirs) == {0.0 if overflows else 1.0}
