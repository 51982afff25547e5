"""A trainer that trains nothing: it measures and answers as the trainer of a run does, for models that are saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.features import attention
from hf_mps.finetune.features.machine import precision_of
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.run import checks
from hf_mps.finetune.run.stages import one_gpu, refusals_told
from hf_mps.finetune.run.trainer import recipe_trainer
from hf_mps.finetune.tasks import Prepared

# Beginnings of arguments that say how weights change and what is kept of them: nothing here does either.
OF_TRAINING = (
    *("max_steps", "num_train", "warmup", "lr_scheduler", "optim", "learning_rate", "weight_decay", "adam_"),
    *("max_grad", "gradient_", "activation_checkpointing", "neftune", "fsdp", "torch_compile", "auto_find"),
    *("save_", "load_best", "metric_for_best", "greater_is_better", "resume_from", "restore_callback", "logging_"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "report_to", "run_name", "train_sampling"),
    *("dataloader_drop_last", "dataloader_persistent", "dataloader_num_workers", "batch_sampler", "use_cpu"),
)
EVALUATED = "per_device_eval_batch_size"


def trainer(
    made: Prepared, recipe: Recipe, device: Choice[str], folder: Path, chosen: Mapping[str, Any], batch: int | None
) -> tuple[Any, dict[str, Choice[Any]]]:
    """Return the task's trainer for `made` on `device`, and what was chosen for it: precision and batch.

    `chosen` are the values of the run's own choices; batches are as large as those of its evaluations, so that the
    answers are equal to the last bit. Nothing is written but an empty `folder`. Raises UserError for arguments that
    transformers refuses and a precision that the device lacks.
    """
    from transformers import PrinterCallback, TrainingArguments

    parts = made.parts
    if made.splits:
        parts |= {"train_dataset": made.sample, "eval_dataset": made.validation}
        # The sparse encoder's trainer asks for a list of callbacks.
        parts |= {"compute_metrics": made.compute_metrics, "callbacks": []}
    left_out = OF_TRAINING if device.value == "cuda" else (*OF_TRAINING, *checks.CUDA_ALONE)
    said = {k: value for k, value in recipe.training.items() if value is not None and not k.startswith(left_out)}
    precision, mixed = precision_of(said, device.value)
    own = None if made.splits else made.task.batch  # rows with labels are measured as a run measures them
    trained = chosen.get("batch")
    why = "as in the evaluations of its run" if trained else "the size of a run's evaluations"
    size = Choice(max(trained if isinstance(trained, int) else 0, DEFAULT_BATCH), why)
    if batch is not None:
        size = Choice(batch, "--batch")
    elif own is not None:
        size = Choice(own, "the task's own")
    elif EVALUATED in said:
        size = Choice(said[EVALUATED], f"training.{EVALUATED} in the recipe")
    defaults = {key: value for key, value in made.arguments_defaults.items() if not key.startswith(OF_TRAINING)}
    ours = {
        **{"output_dir": str(folder), "report_to": "none", "disable_tqdm": True, "seed": recipe.seed},
        **{"eval_strategy": "no", "save_strategy": "no", "use_cpu": device.value == "cpu"},
        EVALUATED: size.value,
    }
    attention.give(made, attention.choose(recipe.attention, made))
    with refusals_told():
        pinned = {"dataloader_pin_memory": device.value == "cuda"}
        arguments = (made.arguments or TrainingArguments)(**(pinned | defaults | mixed | said | ours))
        # A task may name a function that makes its trainer: sentence-transformers' cannot be made without a loss.
        named = made.trainer
        kind = recipe_trainer(named) if named is None or isinstance(named, type) else named
        built = kind(args=one_gpu(arguments), **parts)
    # What embeddings.apart returns is no trainer.
    if hasattr(built, "remove_callback"):
        built.remove_callback(PrinterCallback)
    return built, {"precision": precision, "batch": size}


def forget_rows(trainer: Any) -> None:
    """Let go of the rows that `trainer` has answered: accelerate keeps every data loader that it has prepared."""
    if (accelerator := getattr(trainer, "accelerator", None)) is not None:
        accelerator._dataloaders.clear()
