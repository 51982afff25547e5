"""Whether a training's steps are recorded as CUDA graphs, and why not: what is known before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune import sharding
from hf_mps.finetune.features import early_steps
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan, value_of
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.run.trainer import trainer_class
from hf_mps.finetune.tasks import Prepared

KEY = "cuda_graphs"
ON, OFF = "on", "off"
CHECKPOINTING = "checkpointed layers read the random state, which CUDA cannot record"
FSDP = "FSDP gathers each block's weights and frees them again while a step runs, which a graph cannot"
# Options of TrainingArguments under which a step does more than a graph can hold, and what.
OBSTACLES = {
    "gradient_checkpointing": CHECKPOINTING,
    "activation_checkpointing": CHECKPOINTING,
    "torch_compile": "torch.compile makes its own",
    "debug": "debug looks at every module's numbers",
    "torch_empty_cache_steps": "torch_empty_cache_steps frees memory in the middle of a step",
    "auto_find_batch_size": "auto_find_batch_size needs a step's memory back when it fails",
    "deepspeed": "DeepSpeed steps by itself",
}


class CudaGraphs(Feature):
    """A step of one shape is recorded once and replayed by a single launch (`hf_mps.finetune.cuda_graphs`)."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `cuda_graphs`, on CUDA alone."""
        found = decide(draft.recipe, draft.training, draft.device)
        if found is not None and found.value == ON and value_of(draft.choices, early_steps.KEY) == early_steps.ON:
            found = refused(draft.recipe.cuda_graphs, "weights step in the backward pass")
        if found is not None:
            draft.choices[KEY] = found

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Let the trainer record its steps; say why its class or its model cannot.

        Raises UserError where the recipe asks for graphs that this trainer cannot have.
        """
        if value_of(plan.choices, KEY) != ON:
            return
        asked = plan.recipe.cuda_graphs
        if why := obstacle(trainer):
            plan.choices[KEY] = refused(asked, why)
            return
        from hf_mps.finetune.cuda_graphs.graphs import Graphs
        from hf_mps.finetune.cuda_graphs.steps import StepCapture, with_capture

        with_capture(trainer, StepCapture(trainer, Graphs(), required=bool(asked)))

    def outcome(self, trainer: Any, choices: dict[str, Choice[Any]]) -> None:
        """Say what ran as graphs, and drop them."""
        if value_of(choices, KEY) == ON:
            choices[KEY] = trainer.step_method.outcome()
            trainer.step_method.close()


def decide(recipe: Recipe, training: Mapping[str, Any], device: str) -> Choice[str] | None:
    """Choose ON or OFF for a run; None where nothing is to be said, on another device than CUDA's.

    Raises UserError where the recipe asks for graphs that the run cannot have.
    """
    asked = recipe.cuda_graphs
    if device != "cuda":
        if asked:
            raise UserError(f"{KEY} is true, and the device is {device}; leave it out")
        return None
    if asked is False:
        return Choice(OFF, SAID)
    if asked is None and not recipe.optimizations:
        return Choice(OFF, "optimizations is false in the recipe")
    if sharding.asked(training):
        return refused(asked, FSDP)
    for key, why in OBSTACLES.items():
        if training.get(key):
            return refused(asked, why)
    return Choice(ON, SAID if asked else "a step's hundreds of launches become one; the numbers are the same")


def refused(asked: bool | None, why: str) -> Choice[str]:
    """Return OFF with the reason; raises UserError where the recipe asks for graphs."""
    if asked:
        raise UserError(f"{KEY} is true, and {why}; leave one of them out")
    return Choice(OFF, why)


def obstacle(trainer: Any) -> str:
    """Return why the steps of `trainer` cannot be recorded, as a clause; empty where they can."""
    from transformers import Trainer

    kind = trainer_class(trainer)
    if trainer.is_fsdp_enabled:
        return FSDP
    for method in ("compute_loss", "training_step"):
        if getattr(kind, method) is not getattr(Trainer, method):
            return f"{kind.__name__} defines its own {method}, which may do more than CUDA can record"
    if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in trainer.model.parameters()):
        return "the model's parameters have hooks, which a graph would leave out"
    return ""
