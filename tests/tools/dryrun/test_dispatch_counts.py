"""The audit and the simulated device count the same of one step: both ask the same rules."""

from __future__ import annotations

import pytest
import torch
from transformers import default_data_collator

from hf_mps.metal import simulator
from hf_mps.metal.device import machine
from hf_mps.metal.operators import launch_class
from hf_mps.tools.dryrun.audit.record import OperatorRecorder
from hf_mps.tools.dryrun.launches import of_calls
from hf_mps.tools.dryrun.modules import ModuleTracker
from tests.layer.fused_step import families

pytestmark = pytest.mark.usefixtures("mps")


@pytest.mark.parametrize("name", ["encoder", "decoder with LoRA", "pictures"])
def test_a_step_is_as_many_launches_blits_and_encoders_to_the_audit_as_to_the_device(name: str) -> None:
    model, rows = families.made(name)
    model.to("mps").train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    batch = default_data_collator(rows[: families.BATCH])

    def step() -> float:
        loss = model(**{key: value.to("mps") for key, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step()  # guards have their trials, the optimizer makes its states
    recorder = OperatorRecorder(ModuleTracker())
    with simulator.counted() as counts, recorder:
        step()
    major, minor, *_ = map(int, str(machine.present().macos).split("."))
    audit = of_calls(recorder.calls, launch_class.nearest(torch.__version__, macos=(major, minor)))
    figures = counts.figures
    assert audit.total > 200
    assert (audit.total, audit.blits, audit.encoders) == (figures.launches, figures.blits, figures.encoders)


def test_a_stock_clip_of_many_gradients_is_three_dispatches_and_a_blit_each() -> None:
    """Norms, their stack, products: what the audit counted as two and one more before."""
    weights = [torch.nn.Parameter(torch.ones(8, device="mps")) for _ in range(40)]
    for each in weights:
        each.grad = torch.ones_like(each)
    with simulator.counted() as counts:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
    assert counts.operators["aten::linalg_vector_norm"] == 41
    assert counts.operators["aten::mul_.Tensor"] == 40
    assert counts.blits + counts.operators["aten::cat"] == 40, "the stack: blits before 2.14, dispatches from then on"
