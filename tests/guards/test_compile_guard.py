"""torch_compile=True trains, also where a graph cannot be compiled; torch's own switches stay the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from torch import nn

from hf_mps import guards
from hf_mps.guards import GuardNotice
from hf_mps.guards.compile import ERRORS, LAYOUT
from tests.guards import loops


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """torch's switches, and what it has compiled, as they were."""
    with loops.own_compiler():
        yield


def compiled_step() -> torch.Tensor:
    """A step of a compiled model in an Accelerate loop, and its loss."""
    accelerator = loops.new_accelerator(dynamo_backend="inductor")
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(3, 1))
    loss: torch.Tensor = model(torch.ones(2, 3, device="mps")).square().sum()
    accelerator.backward(loss)
    return loss


def test_with_it_the_step_is_taken_as_it_is() -> None:
    with pytest.warns(GuardNotice, match="torch.compile leaves layouts as they are and runs as it is what it cannot"):
        loss = compiled_step()
    torch.manual_seed(0)
    assert float(loss) == pytest.approx(float(nn.Linear(3, 1)(torch.ones(2, 3)).square().sum()))
    assert not torch._inductor.config.layout_optimization


def test_where_a_program_compiles_itself_layouts_stay_and_errors_are_its_own() -> None:
    model = torch.compile(nn.Linear(3, 1).to("mps"))
    with (
        pytest.warns(GuardNotice, match="torch.compile leaves layouts as they are; on Metal it is young"),
        pytest.raises(Exception, match="Metal source"),
    ):
        model(torch.ones(2, 3, device="mps"))
    assert not torch._inductor.config.layout_optimization
    assert not torch._dynamo.config.suppress_errors


def test_what_is_compiled_for_the_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward)
    compiled = torch.compile(lambda x: x * 2)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch._inductor.config.layout_optimization
    assert not guards.get("compile").times


def test_switches_that_the_user_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAYOUT, "1")
    monkeypatch.setenv(ERRORS, "")
    torch._inductor.config.layout_optimization = True
    with pytest.raises(Exception, match="Metal source"):
        compiled_step()
    assert torch._inductor.config.layout_optimization
    assert not guards.get("compile").times


def test_a_model_that_is_not_compiled_changes_nothing() -> None:
    loops.new_accelerator().prepare(nn.Linear(3, 1))
    assert torch._inductor.config.layout_optimization
    assert not torch._dynamo.config.suppress_errors
