"""FSDP2: whether a model is divided over the ranks of a run, how, and what of a recipe does not go with it.

Accelerate and PyTorch divide it: weights, gradients and the state of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.distributed.world import World
from hf_mps.finetune import tasks
from hf_mps.finetune.sharding import settings

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.schema import Recipe
    from hf_mps.finetune.tasks._base import Prepared

KEY = "sharding"
WITHOUT = "next: the same recipe without training.fsdp, which trains a whole model on each rank"
# Optimizers whose state PyTorch makes of the weights' parts; others look at a weight's rows and columns, or pack it.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


def choose(recipe: Recipe, training: Mapping[str, Any], prepared: Prepared, device: str) -> Choice[str] | None:
    """Return how the model is divided; None where nobody asks for it.

    Raises UserError for what cannot be divided: on this device, in one process, of this task.
    """
    asker = settings.asked(training)
    if not asker:
        if training.get("fsdp_config"):
            raise UserError("training.fsdp_config says how FSDP divides a model; next: training.fsdp=true")
        return None
    if asker == settings.BY_FILE:
        settings.refuse_fsdp1()
    world = World.here()
    if device == "mps":
        raise UserError(
            "recipes have FSDP on CUDA and the CPU: on mps PyTorch cannot free a storage, and gathered weights would"
            " stay; next: LoRA, or training.gradient_checkpointing=true, which make room in one Mac"
        )
    if world.alone:
        raise UserError(
            f"FSDP ({asker}) divides a model over several processes, and this is one; next: torchrun --nproc_per_node 2"
            " -m hf_mps.finetune RECIPE; what each would hold: hf-mps plan RECIPE --ranks 2"
        )
    if why := _obstacle(recipe, training):
        raise UserError(f"FSDP ({asker}): {why}; {WITHOUT}")
    names = settings.blocks(prepared.model)
    told = f"{asker}; weights, gradients and the optimizer's state are divided {_gathered(names)}"
    return Choice(f"FSDP2 over {world.size} ranks", told)


def arguments(training: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """TrainingArguments' keywords for a run under FSDP; accelerate reads its file's settings itself."""
    if settings.asked(training) == settings.BY_FILE:
        return {}
    return {"fsdp": True, "fsdp_config": settings.config(training, model)}


def _obstacle(recipe: Recipe, training: Mapping[str, Any]) -> str:
    if why := tasks.find(recipe.task).unsharded:
        return f"of task {recipe.task}: {why}"
    for key, value in (("step_in_backward", recipe.step_in_backward or False), ("weights", recipe.weights)):
        if value not in (False, "float32"):
            return f"{key}={str(value).lower()} steps whole weights, and a rank has parts of them; leave it out"
    optimizer = str(training.get("optim", OPTIMIZERS[0]))
    if optimizer not in OPTIMIZERS:
        return f"training.optim={optimizer} keeps no state that can be divided; allowed: {', '.join(OPTIMIZERS)}"
    return ""


def _gathered(names: list[str]) -> str:
    if not names:
        return "and the whole model is gathered at once"
    return f"and each {' and '.join(names)} is gathered while it computes"
