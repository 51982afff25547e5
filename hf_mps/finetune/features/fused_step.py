"""What a training step does with fewer launches (`hf_mps.layer.fused_step`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.features.base import Draft, Feature, Plan
from hf_mps.layer.fused_step import switch

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
