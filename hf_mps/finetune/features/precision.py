"""The precision of a run: the recipe's, the device's default, or the one that a trial on this machine finds faster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune import sharding
from hf_mps.finetune.features import cuda_graphs
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan, value_of
from hf_mps.finetune.tasks._base import Prepared

KEY = "precision"
WORTH_STEPS = {"cuda": 1000, "cpu": 200}
"""Optimizer steps from which on the saving repays the trial: on CUDA about a second in a new process, which loads each
candidate's kernels, against 1 to 3 ms a step for a BERT; on a CPU six passes, of which the chosen one may save half."""
USERS = ("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval")


class Precision(Feature):
    """float32 on Metal and on CPUs without bfloat16; on CUDA and on other CPUs what is faster, by a trial."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `precision`."""
        draft.choices[KEY], mixed = precision_of(draft.training, draft.device)
        draft.arguments |= mixed

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Keep what was measured in every checkpoint, and count the time that it took."""
        found = plan.choices[KEY]
        if hasattr(found, "seconds"):
            from hf_mps.finetune.cuda_graphs import precision
            from hf_mps.finetune.run.callbacks import Stopwatch

            trainer.add_callback(precision.MeasuredPrecision(found.value, found.reason))
            for watch in trainer.callback_handler.callbacks:
                if isinstance(watch, Stopwatch):
                    watch.before = found.seconds

    def try_out(self, plan: Plan, prepared: Prepared, checkpoint: Path | None) -> None:
        """Train in the precision that the device is faster in.

        Nothing is measured on Metal, on CPUs without bfloat16, where the user says a precision or halves, for short
        runs, and under FSDP, whose model may be too large for one device. A run that goes on from `checkpoint` takes
        what was measured when it began.
        """
        recipe, device = plan.recipe, plan.device.value
        if device == "mps" or recipe.weights != "float32" or not recipe.optimizations or sharding.KEY in plan.choices:
            return
        if not can_gain(device):
            return
        if why := skipped(recipe.training, prepared, plan.choices["steps"].value, device):
            if device == "cuda":  # float32 on a CPU is what everybody expects, and needs no excuse
                default = plan.choices[KEY]
                plan.choices[KEY] = Choice(default.value, f"{default.reason}; not measured: {why}")
            return
        from hf_mps.distributed.ranks import Ranks
        from hf_mps.finetune.cuda_graphs import precision

        begun = checkpoint or recipe.training.get("resume_from_checkpoint")
        found, seconds = precision.stored(Path(begun)) if begun else None, 0.0
        if found is None:
            if begun:  # it trained in the default
                return
            clock = time.perf_counter()
            # One process measures: each on its own device could find another one faster.
            found, without = Ranks.here().from_main(lambda: _tried(plan, prepared))
            if without:
                plan.choices[cuda_graphs.KEY] = cuda_graphs.refused(recipe.cuda_graphs, without)
            seconds = time.perf_counter() - clock
        plan.choices[KEY] = precision.Measured(found.value, found.reason, seconds)
        for setting in precision.SETTINGS.values():
            for key in setting:
                plan.arguments.pop(key, None)
        plan.arguments.update(precision.SETTINGS[found.value])
        if found.value == "tf32":
            precision.products_in_tf32()


def can_gain(device: str) -> bool:
    """Return whether there is something to choose on this device: Metal has no autocast that saves time for sure."""
    if device != "cpu":
        return device == "cuda"
    import torch

    supported = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(ask is not None and ask() for ask in supported)


def skipped(training: Mapping[str, Any], prepared: Prepared, steps: int, device: str) -> str:
    """Return why a run is not timed before it begins, as a clause; empty where it is."""
    import torch
    from transformers import Trainer

    if said := [key for key in USERS if training.get(key) is not None]:
        return f"training.{said[0]} in the recipe"
    if steps < WORTH_STEPS[device]:
        return f"{steps} steps are too few to repay a trial of others"
    if getattr(prepared.trainer, "compute_loss", Trainer.compute_loss) is not Trainer.compute_loss:
        return "the task's trainer computes its own loss"
    if any(parameter.dtype != torch.float32 for parameter in prepared.model.parameters()):
        return "the model's weights are not float32"
    return ""


def precision_of(training: Mapping[str, Any], device_type: str) -> tuple[Choice[str], dict[str, Any]]:
    """Choose fp32, bf16 or fp16, with the arguments for Trainer. Raises UserError for one that the device lacks."""
    from hf_mps.metal.device import precision

    chosen = [name for name in ("bf16", "fp16") if training.get(name)]
    if len(chosen) == 2:
        raise UserError("training.bf16 and training.fp16 are both true; give one of them")
    for name in ("bf16", "fp16"):
        if training.get(name) or training.get(f"{name}_full_eval"):
            try:
                found = precision.requested(name, device_type)
            except UserError as error:
                raise UserError(f"training.{name}: {error}; leave it out") from error
    if chosen:
        return Choice(chosen[0], found.reason), {}
    if "bf16" in training or "fp16" in training:
        return Choice("fp32", SAID), {}
    default = precision.default(device_type)
    return default, {default.value: True} if default.value != "fp32" else {}


def _tried(plan: Plan, prepared: Prepared) -> tuple[Choice[str], str]:
    """Return the faster precision, and why its steps cannot be recorded where that was tried and failed."""
    import torch

    from hf_mps.finetune.cuda_graphs import precision
    from hf_mps.finetune.cuda_graphs.graphs import Graphs, RecordingFailed

    batch = precision.sample(prepared, plan.choices["batch"].value)
    graphs = Graphs if value_of(plan.choices, cuda_graphs.KEY) == cuda_graphs.ON else None
    asked = precision.conditions(prepared.model, shape(batch), plan.device.value, graphs=graphs is not None)
    if (before := precision.find_kept(asked, precision.CANDIDATES[plan.device.value])) is not None:
        return before
    device = torch.device("cuda", torch.cuda.current_device()) if plan.device.value == "cuda" else torch.device("cpu")
    prepared.model.to(device)
    try:
        trials, without = precision.measure(prepared.model, batch, graphs=graphs, device=device), ""
    except RecordingFailed as error:
        trials, without = precision.measure(prepared.model, batch, graphs=None, device=device), str(error)
    precision.keep_measured(asked, found := precision.decide(trials, shape(batch)), without)
    return found, without


def shape(batch: Any) -> str:
    """Return the shape of a batch's first tensor in words: `32 x 64`."""
    first = next(iter(batch.values()))
    return " x ".join(map(str, first.shape))
