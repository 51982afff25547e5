"""Who has steps fused, and what they are told: scripts by a variable, recipes by their plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import BertConfig, BertModel

from hf_mps.core.errors import UserError
from hf_mps.core.import_hooks import Catalogue
from hf_mps.core.registry import Registry
from hf_mps.layer.fused_step import switch
from hf_mps.layer.fused_step.optimizer import GRADIENT_CLIP, GradientClip
from hf_mps.layer.fused_step.parts import PARTS
from tests.refusals import refusal


def model() -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))


@pytest.mark.macos(15)
def test_a_recipe_is_told_what_its_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_MPS_FUSED_STEP", raising=False)
    chosen = switch.choose(None, model(), "mps")
    assert chosen.value.parts == snapshot(
        (
            "12 gradients are clipped 28 at a time",
            "Adam's step counters in one buffer",
            "each batch in one copy",
            "labels counted on the host",
        )
    )
    assert str(chosen.value) == snapshot("fewer, larger GPU operations, by 4 changes")
    assert chosen.reason == f"{switch.REASON}; {switch.PLAIN}"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_where_it_saves_nothing_it_is_off_and_cannot_be_asked_for(device_type: str) -> None:
    off = switch.choose(None, model(), device_type)
    assert (off.value, bool(off.reason)) == (switch.OFF, True)
    with pytest.raises(UserError, match=f"fused_step is true, and on {device_type} .*; leave it out"):
        switch.choose(True, model(), device_type)


def test_on_cuda_queries_keys_and_values_are_one_product_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_MPS_FUSED_STEP", raising=False)
    made = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    chosen = switch.choose(None, made, "cuda")
    assert (str(chosen.value), chosen.reason) == snapshot(
        (
            "queries, keys and values in one product, their weights side by side in memory",
            "their input is cast once, and one wide product is faster than three; fused_step=false launches as"
            " the plain Trainer does",
        )
    )
    with switch.running(chosen, "cuda"):
        assert [part.name for part in switch.parts() if part.on] == ["joint-projections"]


@pytest.mark.parametrize(
    ("asked", "variable", "on"),
    [(None, None, True), (None, "0", False), (None, "1", True), (True, "0", True), (False, "1", False)],
)
def test_the_recipes_word_beats_the_variable_and_that_the_default(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, variable: str | None, on: bool
) -> None:
    monkeypatch.delenv("HF_MPS_FUSED_STEP", raising=False)
    if variable is not None:
        monkeypatch.setenv("HF_MPS_FUSED_STEP", variable)
    assert (switch.choose(asked, model(), "mps").value != switch.OFF) == on


def test_a_value_that_nobody_knows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_FUSED_STEP", "yes")
    assert refusal(switch.choose, None, model(), "mps") == snapshot(
        "HF_MPS_FUSED_STEP=yes is not a value it knows; allowed: 0, 1"
    )


def test_every_part_is_off_before_and_after_a_training() -> None:
    assert not any(part.on for part in switch.parts())
    with switch.running(switch.choose(True, model(), "mps"), "mps"):
        assert all(part.on for part in switch.parts() if part.pays("mps"))
        with switch.running(switch.choose(False, model(), "mps"), "mps"):
            assert not any(part.on for part in switch.parts())
    assert not any(part.on for part in switch.parts())


SCRIPT = """
import torch
weights = [torch.nn.Parameter(torch.ones(8, 8, device="mps")) for _ in range(6)]
optimizer = torch.optim.AdamW(weights)
for _ in range(2):
    torch.stack(weights).sum().backward()
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(optimizer.param_groups[0]["fused"])
"""


@pytest.mark.parametrize(
    ("value", "fused", "told"),
    [("1", "True", "HF_MPS_FUSED_STEP=1: training steps on mps launch less: "), ("yes", "None", "")],
)
def test_a_script_that_asks_is_told_once_and_others_run_as_they_are(
    run_python: Any, value: str, fused: str, told: str
) -> None:
    done = run_python("-c", SCRIPT, env={"HF_MPS_SIMULATE": "1", "HF_MPS_FUSED_STEP": value})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{fused}\n"
    lines = [line for line in done.stderr.splitlines() if "HF_MPS_FUSED_STEP" in line]
    if value == "yes":
        assert "HF_MPS_FUSED_STEP=yes is not a value it knows; allowed: 0, 1" in lines[0]
    else:
        assert [line.startswith(f"hf-mps: {told}") for line in lines] == [True] * bool(told)


def test_a_program_that_fuses_nothing_loads_none_of_it(run_python: Any) -> None:
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('hf_mps.layer.fused_step.')])"
    assert run_python("-c", code, env={"HF_MPS_SIMULATE": "1"}).stdout == "['hf_mps.layer.fused_step.parts']\n"


def test_a_library_that_is_not_known_costs_one_part_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = GradientClip()
    monkeypatch.setattr(GradientClip, "patches", {"torch:clip_gradients_of_tomorrow": "_norm"})
    catalogue = Catalogue("step", {"torch": "gradient-clip"}, PARTS.home, lambda module, name: part)
    Registry(catalogue).start()
    part.devices = frozenset({"mps"})
    assert not part.on
    assert capsys.readouterr().err == snapshot(
        "hf-mps: the fused step's gradient-clip does not know this version of torch (AttributeError: there is no"
        " torch:clip_gradients_of_tomorrow); it is disabled; training continues\n"
    )


def test_a_part_that_fails_leaves_the_step_to_stock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = [torch.nn.Parameter(torch.ones(3, device="mps")) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    monkeypatch.setattr(GRADIENT_CLIP, "broken", False)
    monkeypatch.setattr(GRADIENT_CLIP, "_ours", lambda gradients: 1 / 0)
    with switch.running(switch.choose(True, model(), "mps"), "mps"):
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    assert float(norm) == 3.0
    assert not GRADIENT_CLIP.on
    assert "the fused step's gradient-clip failed: ZeroDivisionError" in capsys.readouterr().err
