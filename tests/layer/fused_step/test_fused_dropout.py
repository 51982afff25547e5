"""Dropout as one kernel: stock's distribution, a mask that the gradient has too, and the generator's state decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from scipy import stats
from torch.utils.checkpoint import checkpoint

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.fused_step import switch
from hf_mps.layer.fused_step.fused_dropout import FUSED_DROPOUT, STOCK_FUSES
from hf_mps.metal import simulator
from tests.layer.fused_step.conftest import Fused
from tests.layer.guards.loops import own_compiler

COUNT = 100_000
FUSED_BY_STOCK = torch_release() >= STOCK_FUSES


def ones(count: int = 64, **how: Any) -> torch.Tensor:
    return torch.ones(count, device="mps", requires_grad=True, **how)


def fused_node(result: torch.Tensor) -> bool:
    return type(result.grad_fn).__name__ == "NativeDropoutBackward0"


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F.dropout": lambda x: functional.dropout(x, 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "nn.Dropout": lambda x: torch.nn.Dropout(0.3)(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_whoever_calls_dropout_launches_one_kernel_each_way(name: str, fused: Fused) -> None:
    x = ones()
    with simulator.counted() as before:
        CALLS[name](x)
    with fused(), simulator.counted() as counts:
        result = CALLS[name](x)
        forward = counts.launches
        result.backward(torch.ones_like(x))
    assert fused_node(result)
    assert (before.launches, forward) == (1 if FUSED_BY_STOCK else 3, 1)


def test_attentions_own_dropout_does_too(fused: Fused) -> None:
    query = torch.ones(1, 2, 8, 4, device="mps", requires_grad=True)
    with simulator.counted() as before:
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    with fused(), simulator.counted() as counts:
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert before.launches - counts.launches >= (0 if FUSED_BY_STOCK else 2)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_many_are_kept_as_the_binomial_has_it_and_scaled_exactly(p: float, dtype: torch.dtype, fused: Fused) -> None:
    torch.manual_seed(0)
    with fused():
        dropped = functional.dropout(ones(COUNT, dtype=dtype), p).detach().cpu()
    kept = int((dropped != 0).sum())
    assert stats.binomtest(kept, COUNT, 1 - p).pvalue > 1e-4
    # Neighbours are independent: pairs that are both kept are as many as chance has it.
    both = int(((dropped[::2] != 0) & (dropped[1::2] != 0)).sum())
    assert stats.binomtest(both, COUNT // 2, (1 - p) ** 2).pvalue > 1e-4
    scale = torch.tensor(1 / (1 - p), dtype=dtype)
    torch.testing.assert_close(
        dropped[dropped != 0].unique(), scale[None], rtol=2e-7 if dtype.itemsize == 4 else 0, atol=0
    )


def test_the_gradient_has_the_same_mask(fused: Fused) -> None:
    x = torch.randn(COUNT, device="mps").requires_grad_()
    with fused():
        result = functional.dropout(x, 0.3)
    result.backward(torch.ones_like(result))
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), result.detach())


def test_a_second_gradient_goes_through_the_same_mask(fused: Fused) -> None:
    x = ones()
    with fused():
        dropped = functional.dropout(x**2, 0.5)
    (first,) = torch.autograd.grad(dropped.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 2 * dropped.detach())


def test_the_generators_state_decides(fused: Fused) -> None:
    x = ones(COUNT)
    with fused():
        torch.manual_seed(3)
        first, state = functional.dropout(x), torch.mps.get_rng_state()
        second = functional.dropout(x)
        torch.mps.set_rng_state(state)
        again = functional.dropout(x)
        torch.manual_seed(3)
        assert torch.equal(functional.dropout(x), first)
    assert torch.equal(again, second)
    assert not torch.equal(first, second)


def test_checkpointing_repeats_the_mask(fused: Fused) -> None:
    assert guards.get("checkpoint-rng").on
    x = ones(COUNT)
    with fused():
        y: Any = checkpoint(lambda value: functional.dropout(value * value, 0.5), x, use_reentrant=False)
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_keeps_the_dtype(dtype: torch.dtype, fused: Fused) -> None:
    layer = torch.nn.Linear(8, 8).to("mps")
    with fused(), torch.autocast("mps", dtype):
        result = functional.dropout(layer(torch.ones(2, 8, device="mps")))
    assert result.dtype == dtype
    assert fused_node(result)


def stocks() -> dict[str, Callable[[], torch.Tensor]]:
    x = ones()
    return {
        "evaluation": lambda: functional.dropout(x, 0.3, training=False),
        "nothing is dropped": lambda: functional.dropout(x, 0.0),
        "all is": lambda: functional.dropout(x, 1.0),
        "in place": lambda: functional.dropout(x * 1, 0.3, inplace=True),
        "channels": lambda: functional.dropout2d(torch.ones(2, 3, 4, 4, device="mps"), 0.3),
        "strided": lambda: functional.dropout(ones(6).view(2, 3).t(), 0.3),
        "on the host": lambda: functional.dropout(torch.ones(3, requires_grad=True), 0.3),
        "nothing": lambda: functional.dropout(x[:0], 0.3),
        "torch.func": lambda: torch.func.vmap(lambda row: functional.dropout(row, 0.3), randomness="different")(
            torch.ones(3, 4, device="mps")
        ),
    }


@pytest.mark.parametrize("name", stocks())
def test_these_run_as_stock_does(name: str, fused: Fused) -> None:
    torch.manual_seed(1)
    expected = stocks()[name]()
    with fused():
        torch.manual_seed(1)
        found = stocks()[name]()
    assert torch.equal(found, expected)
    assert (found.stride(), type(found.grad_fn)) == (expected.stride(), type(expected.grad_fn))


def test_what_a_compiler_traces_is_unchanged(fused: Fused) -> None:
    graphs: list[list[str]] = []

    def noting(module: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: Any, given: Any) -> Any:
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return graph.forward

        return aot_autograd(fw_compiler=keep)(module, inputs)

    for on in (False, True):
        with own_compiler(), fused() if on else guards.suspended("compile"):
            torch.compile(lambda x: functional.dropout(x, 0.5) * 2, backend=noting)(ones())
    assert graphs[0] == graphs[1]


def test_off_means_stocks_draws(fused: Fused) -> None:
    with fused():
        pass
    assert fused_node(functional.dropout(ones())) is FUSED_BY_STOCK


def test_where_stock_takes_the_kernel_the_part_stays_off(fused: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mps.layer.fused_step.fused_dropout.torch_release", lambda: STOCK_FUSES)
    with fused():
        assert not FUSED_DROPOUT.on
        assert fused_node(functional.dropout(ones())) is FUSED_BY_STOCK


def test_the_header_says_so_where_a_model_drops() -> None:
    plain, dropping = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout(0.1))
    assert FUSED_DROPOUT.words(plain, "mps") == ""
    assert FUSED_DROPOUT.words(dropping, "mps") == FUSED_DROPOUT.what
    assert ("other masks" in repr(switch.choose(None, dropping, "mps").value)) is not FUSED_BY_STOCK
    assert FUSED_DROPOUT.pays("cuda") == ""


@pytest.mark.skipif(FUSED_BY_STOCK, reason="the part is not on where PyTorch fuses dropout itself")
def test_a_question_that_fails_costs_the_part_alone_and_the_call_is_stocks(
    fused: Fused, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> bool:
        raise ValueError("not so")

    switch.arm()
    (around,) = FUSED_DROPOUT.arounds
    monkeypatch.setattr(FUSED_DROPOUT, "broken", False)
    monkeypatch.setattr(around, "when", fails)
    with fused():
        result = functional.dropout(ones(), 0.3)
        assert not FUSED_DROPOUT.on
    assert not fused_node(result)
    assert "the fused step's fused-dropout failed: ValueError: not so" in capsys.readouterr().err
