"""The features of a run in the order in which they decide: each sees what those before it have decided.

Those that other rooms carry out are here: FSDP2, quantized weights, the fused step and a smoke run's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune import sharding, smoke
from hf_mps.finetune.features.arguments import Batches, Evaluation, KeptModel, Loading, Optimizer, Output, Seed
from hf_mps.finetune.features.attention import Attention, AttentionKernels
from hf_mps.finetune.features.base import Draft, Feature, Plan
from hf_mps.finetune.features.cuda_graphs import CudaGraphs
from hf_mps.finetune.features.early_steps import EarlySteps
from hf_mps.finetune.features.machine import ExpectedFallback, MemoryFit, NoSleep, OneGpu, Precision
from hf_mps.finetune.models import quantization
from hf_mps.finetune.tasks import Prepared
from hf_mps.layer.fused_step import switch


class QuantizedWeights(Feature):
    """The task chooses and loads them (`models.quantization`), since they are rounded while they are read."""

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Put a quantized model on the device."""
        if quantization.is_quantized(trainer.model):
            trainer.model.to(trainer.args.device)


class Sharding(Feature):
    """The model is divided over the ranks where `training.fsdp` or accelerate's file asks for it."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `sharding`."""
        found = sharding.choose(draft.recipe, draft.training, draft.prepared, draft.device)
        if found is not None:
            draft.choices[sharding.KEY] = found
            draft.training |= sharding.arguments(draft.training, draft.prepared.model)

    def making(self, plan: Plan, prepared: Prepared) -> AbstractContextManager[Any]:
        """Let the trainer's accelerator take the plugin."""
        return sharding.ready(prepared.model, plan.device.value) if sharding.KEY in plan.choices else nullcontext()

    def around(self, trainer: Any, plan: Plan) -> AbstractContextManager[Any]:
        """Suppress a warning of FSDP's that is none."""
        return sharding.quiet() if trainer.is_fsdp_enabled else nullcontext()


KEY = "fused_step"


class FusedStep(Feature):
    """The parts of the fused step that pay on this device and act on this model."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `fused_step`."""
        if draft.recipe.fused_step is None and not draft.recipe.optimizations:
            draft.choices[KEY] = Choice(switch.OFF, "optimizations is false in the recipe")
        else:
            draft.choices[KEY] = switch.choose(draft.recipe.fused_step, draft.prepared.model, draft.device)

    def around(self, trainer: Any, plan: Plan) -> AbstractContextManager[Any]:
        """Switch the parts on."""
        return switch.running(plan.choices[KEY], plan.device.value)


class Smoke(Feature):
    """Names --smoke as the reason for what it has changed in the recipe (`hf_mps.finetune.smoke`)."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `smoke`, in a smoke run alone."""
        if draft.resolved.smoke is not None:
            draft.choices["smoke"] = draft.resolved.smoke
            smoke.explain(draft.resolved, draft.choices)


# Evaluation counts by the steps of Batches, and CudaGraphs is ruled out by EarlySteps; Smoke explains what
# others have chosen; the rest of the order is that of the header.
FEATURES: Sequence[Feature] = (
    Precision(),
    Sharding(),
    QuantizedWeights(),
    Batches(),
    Evaluation(),
    KeptModel(),
    Loading(),
    Optimizer(),
    FusedStep(),
    OneGpu(),
    MemoryFit(),
    EarlySteps(),
    Attention(),
    AttentionKernels(),
    CudaGraphs(),
    Seed(),
    ExpectedFallback(),
    NoSleep(),
    Output(),
    Smoke(),
)
