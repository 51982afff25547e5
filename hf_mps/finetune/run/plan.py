"""A run's decisions before it trains, each with its reason; the user's own word in `training` always wins."""

from __future__ import annotations

from pathlib import Path

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.features.base import Draft, Plan
from hf_mps.finetune.features.memory_fit import Room
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.tasks._base import Prepared


def choose_device(recipe: Recipe) -> Choice[str]:
    """Return the device of a run: the layer's choice, or the CPU where the recipe says `use_cpu`. Imports torch.

    Raises UserError where HF_MPS_DEVICE and the recipe contradict each other.
    """
    import hf_mps.device
    from hf_mps import kernels
    from hf_mps.core import settings

    if recipe.training.get("use_cpu"):
        if (wanted := settings.device()) not in (None, "cpu"):
            raise UserError(
                f"training.use_cpu is true and HF_MPS_DEVICE={wanted} asks for another device; give one of them"
            )
        return Choice("cpu", "training.use_cpu in the recipe")
    return kernels.told(hf_mps.device.choose())


def decide(
    recipe: Recipe, prepared: Prepared, chosen: Choice[str], output: Choice[Path], room: Room | None = None
) -> Plan:
    """Decide everything that the training arguments need for `prepared` on the device `chosen`.

    `room` is what the machine's memory asks for. Raises UserError for an option that the device cannot honour.
    """
    from hf_mps.finetune.features import FEATURES

    room = room or Room()
    said = {key: value for key, value in recipe.training.items() if value is not None}
    training = prepared.arguments_defaults | room.training | said
    draft = Draft(recipe, prepared, chosen.value, room, training, dict(prepared.choices), {"report_to": "none"})
    for feature in FEATURES:
        feature.decide(draft)
    draft.choices["output"] = Choice(str(output.value), output.reason)
    ours = {"output_dir": str(output.value), "disable_tqdm": True, "use_cpu": chosen.value == "cpu"}
    return Plan(recipe, chosen, draft.choices, draft.arguments | draft.training | draft.fixed | ours)
