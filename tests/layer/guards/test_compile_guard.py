"""torch.compile on Metal: what it cannot compile still trains, without CUDA graphs; its switches stay the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from torch import nn

from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.platform.cuda import ERRORS, LAYOUT
from hf_mps.metal.simulator import compiled
from tests import hazards
from tests.layer.guards import loops

UNCOMPILABLE = "Metal source of this graph"


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


def test_with_it_a_step_that_cannot_be_compiled_is_taken_as_it_is() -> None:
    with (
        hazards.on("compile"),
        pytest.warns(GuardNotice, match="torch.compile leaves layouts as they are and runs as it is what it cannot"),
    ):
        loss = compiled_step()
    torch.manual_seed(0)
    assert float(loss) == pytest.approx(float(nn.Linear(3, 1)(torch.ones(2, 3)).square().sum()))
    assert not torch._inductor.config.layout_optimization


def test_where_a_program_compiles_itself_layouts_stay_and_errors_are_its_own() -> None:
    model = torch.compile(nn.Linear(3, 1).to("mps"))
    with (
        hazards.on("compile"),
        pytest.warns(GuardNotice, match="torch.compile leaves layouts as they are; on Metal it is young: compare"),
        pytest.raises(Exception, match=UNCOMPILABLE),
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
    with hazards.on("compile"), pytest.raises(Exception, match=UNCOMPILABLE):
        compiled_step()
    assert torch._inductor.config.layout_optimization
    assert not guards.get("compile").times


def test_a_model_that_is_not_compiled_changes_nothing() -> None:
    before = torch._inductor.config.layout_optimization, torch._dynamo.config.suppress_errors
    loops.new_accelerator().prepare(nn.Linear(3, 1))
    assert (torch._inductor.config.layout_optimization, torch._dynamo.config.suppress_errors) == before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether CUDA graphs were still asked for, of each graph that came to the device's compiler."""
    seen: list[bool] = []
    monkeypatch.setattr(
        compiled, "_meet_faults", lambda options, _: seen.append(bool(options.get("triton.cudagraphs")))
    )
    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):  # torch sets them where it hears of CUDA graphs
        monkeypatch.setenv(name, "0")
    return seen


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_with_cuda_graphs_goes_on_without_them(mode: str, asked: list[bool]) -> None:
    model = torch.compile(nn.Linear(3, 1).to("mps"), mode=mode)
    with pytest.warns(GuardNotice, match=r"CUDA graphs of mode reduce-overhead or max-autotune.*issues/188970\)"):
        model(torch.ones(2, 3, device="mps"))
    assert asked == [False]


def test_what_else_a_mode_sets_stays(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_meet_faults", lambda options, _: asked.append(options["max_autotune"]))
    model = torch.compile(nn.Linear(3, 1).to("mps"), mode="max-autotune")
    backend = model._torchdynamo_orig_callable  # the user's object is as it was
    before = dict(backend.config) if hasattr(backend, "config") else None
    model(torch.ones(2, 3, device="mps"))
    assert asked == [True]
    assert before is None or backend.config == before


@pytest.mark.parametrize("how", [{}, {"mode": "max-autotune-no-cudagraphs"}], ids=str)
def test_a_mode_without_cuda_graphs_is_left_alone(how: dict[str, str], asked: list[bool]) -> None:
    torch.compile(nn.Linear(3, 1).to("mps"), **how)(torch.ones(2, 3, device="mps"))
    assert asked == [False]
    assert not guards.get("cuda-graphs").times


def test_on_the_cpu_a_mode_is_left_alone(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, *_, **more: given.append(more) or graph.forward
    )
    torch.compile(lambda x: x * 2, mode="reduce-overhead")(torch.ones(2))
    assert given[0]["config_patches"]["triton.cudagraphs"] is True
    assert not guards.get("cuda-graphs").times
