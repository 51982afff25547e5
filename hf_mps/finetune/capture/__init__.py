"""CUDA graphs of training steps: recorded once for each shape of a batch, replayed by a single launch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.finetune import sharding
from hf_mps.finetune.capture import attention_kernels, decide

if TYPE_CHECKING:
    from hf_mps.finetune.capture.steps import StepCapture
    from hf_mps.finetune.recipe.schema import Recipe
    from hf_mps.finetune.run.plan import Plan
    from hf_mps.finetune.tasks._base import Prepared

KEY, ON = decide.KEY, decide.ON


def install(choices: dict[str, Any], trainer: Any, asked: bool | None) -> StepCapture | None:
    """Let `trainer` record its steps where `choices` say so; writes there why its class or its model cannot.

    Returns the account of what is recorded, None where nothing is. Raises UserError where the recipe asks for graphs
    (`asked`) that this trainer cannot have.
    """
    if KEY not in choices or choices[KEY].value != ON:
        return None
    if why := decide.obstacle(trainer):
        choices[KEY] = decide.refused(asked, why)
        return None
    from hf_mps.finetune.capture.graphs import Graphs
    from hf_mps.finetune.capture.steps import StepCapture, with_capture

    captured = StepCapture(trainer, Graphs(), required=bool(asked))
    with_capture(trainer, captured)
    return captured


def measured(plan: Plan, prepared: Prepared, recipe: Recipe, checkpoint: Path | None) -> Any:
    """Let `plan` train in the precision that its device, CUDA or the CPU, is faster in.

    Return the callback that keeps the choice, None where nothing is measured: on Metal, on CPUs without bfloat16, where
    the user says a precision or halves, for short runs, under FSDP, whose model may be too large for one device. A run
    that goes on from `checkpoint` takes what was measured when it began.
    """
    said = recipe.weights != "float32" or not recipe.speedups
    if plan.device.value == "mps" or said or sharding.KEY in plan.choices:
        return None
    from hf_mps.distributed.ranks import Ranks
    from hf_mps.finetune.capture import precision

    if not precision.can_gain(plan.device.value):
        return None
    if why := precision.skipped(recipe.training, prepared, plan.choices["steps"].value, plan.device.value):
        if plan.device.value == "cuda":  # float32 on a CPU is what everybody expects, and needs no excuse
            default = plan.choices["precision"]
            plan.choices["precision"] = Choice(default.value, f"{default.reason}; not measured: {why}")
        return None
    begun = checkpoint or recipe.training.get("resume_from_checkpoint")
    found, seconds = precision.stored(Path(begun)) if begun else None, 0.0
    if found is None:
        if begun:  # it trained in the default
            return None
        clock = time.perf_counter()
        # One process measures: each on its own device could find another one faster.
        found, without = Ranks.here().from_main(lambda: _tried(plan, prepared))
        if without:
            plan.choices[KEY] = decide.refused(recipe.cuda_graphs, without)
        seconds = time.perf_counter() - clock
    plan.choices["precision"] = found
    for setting in precision.SETTINGS.values():
        for key in setting:
            plan.arguments.pop(key, None)
    plan.arguments.update(precision.SETTINGS[found.value])
    if found.value == "tf32":
        precision.products_in_tf32()
    kept = precision.MeasuredPrecision(found.value, found.reason)
    kept.seconds = seconds
    return kept


def _tried(plan: Plan, prepared: Prepared) -> tuple[Choice[str], str]:
    """Return the faster precision, and why its steps cannot be recorded where that was tried and failed."""
    import torch

    from hf_mps.finetune.capture import kept, precision
    from hf_mps.finetune.capture.graphs import Graphs, RecordingFailed

    batch = precision.sample(prepared, plan.choices["batch"].value)
    graphs = Graphs if KEY in plan.choices and plan.choices[KEY].value == ON else None
    asked = kept.conditions(prepared.model, shape(batch), plan.device.value, graphs=graphs is not None)
    if (before := kept.find(asked, precision.CANDIDATES[plan.device.value])) is not None:
        return before
    device = torch.device("cuda", torch.cuda.current_device()) if plan.device.value == "cuda" else torch.device("cpu")
    prepared.model.to(device)
    try:
        trials, without = precision.measure(prepared.model, batch, graphs=graphs, device=device), ""
    except RecordingFailed as error:
        trials, without = precision.measure(prepared.model, batch, graphs=None, device=device), str(error)
    kept.keep(asked, found := precision.decide(trials, shape(batch)), without)
    return found, without


def choose_kernels(plan: Plan, prepared: Prepared, recipe: Recipe) -> None:
    """Add the kernels of attention to a plan's choices where there are several."""
    if (found := attention_kernels.decide(plan, prepared, recipe)) is not None:
        plan.choices[attention_kernels.KEY] = found


def shape(batch: Any) -> str:
    """Return the shape of a batch's first tensor in words: `32 x 64`."""
    first = next(iter(batch.values()))
    return " x ".join(map(str, first.shape))
