"""A run's decisions before it trains, each with its reason; the user's own word in `training` always wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.distributed.world import World
from hf_mps.finetune import capture, sharding
from hf_mps.finetune.models import attention
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.run import batches, early_steps
from hf_mps.finetune.run.batches import SAID
from hf_mps.finetune.run.room import Room
from hf_mps.finetune.stream import pace
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.metrics.table import LOWER_IS_BETTER

LOSS = "loss"
ROWS_SHOWN = 50
# The rows that a person reads first.
FIRST = ("smoke", "model", "data", "device", "processes", "precision", "batch", "lengths", "steps")


@dataclass(frozen=True)
class Plan:
    """`choices` in the order in which a header shows them; `arguments` are TrainingArguments' keywords."""

    device: Choice[str]
    choices: dict[str, Choice[Any]]
    arguments: dict[str, Any]
    drawn: int | None = None
    """Rows of like length that are drawn at a time, where a run goes on in another number of processes."""

    def shown(self) -> dict[str, Choice[Any]]:
        """Every choice, as the header and results.json have them."""
        every = {"device": self.device, **self.choices}
        return {name: every[name] for name in (*FIRST, *every) if name in every}


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
    room = room or Room()
    said = {key: value for key, value in recipe.training.items() if value is not None}
    training = prepared.arguments_defaults | room.training | said
    choices: dict[str, Choice[Any]] = dict(prepared.choices)
    choices["precision"], mixed = precision_of(training, chosen.value)
    if (sharded := sharding.choose(recipe, training, prepared, chosen.value)) is not None:
        choices[sharding.KEY] = sharded
        training |= sharding.arguments(training, prepared.model)
    early = early_steps.choose(recipe, training, prepared, chosen.value, room.choices.get(early_steps.KEY))
    if (graphs := capture.decide.decide(recipe, training, chosen.value)) is not None:
        if early_steps.steps_early(early) and graphs.value == capture.ON:
            graphs = capture.decide.refused(recipe.cuda_graphs, "weights step in the backward pass")
        choices[capture.KEY] = graphs
    choices |= batches.choose(recipe, training, prepared)
    steps, stream = choices["steps"], prepared.stream
    defaults = {
        **mixed,
        batches.SIZE: choices["batch"].value,
        "per_device_eval_batch_size": max(choices["batch"].value, DEFAULT_BATCH),
        **_cadence(training, steps.value, choices, stream is not None),
        **_kept_model(training, prepared, recipe.early_stopping_patience, choices),
        **_device_settings(training, chosen.value, prepared, choices),
        "report_to": "none",
    }
    choices["optimizer"] = _optimizer(training)
    choices["fused_step"] = _fused_step(recipe, prepared.model, chosen.value)
    choices |= gpus(chosen.value)
    own_attention = attention.choose(recipe.attention, prepared, room.choices.get("attention"))
    choices |= room.choices | early | ({"attention": own_attention} if own_attention is not None else {})
    choices["seed"] = Choice(recipe.seed, "the recipe's seed, for weights, order of the rows and dropout")
    ours = {"output_dir": str(output.value), "seed": recipe.seed, "disable_tqdm": True}
    ours["use_cpu"] = chosen.value == "cpu"
    if not World.here().alone:
        # Else accelerate seeds the order of rows by the state of each rank's own draws (SeedableRandomSampler).
        defaults["data_seed"] = recipe.seed
    if stream is not None:
        ours |= {"max_steps": steps.value, "ignore_data_skip": True}  # no batch is made to be skipped
    choices["output"] = Choice(str(output.value), output.reason)
    return Plan(chosen, choices, defaults | training | ours)


def gpus(device_type: str) -> dict[str, Choice[str]]:
    """Return which of several GPUs a process by itself trains on; nothing where there is one for each process.

    Trainer's own way, DataParallel, would copy the model to all of them at every step and multiply the batch.
    """
    import torch

    count = torch.cuda.device_count() if device_type == "cuda" and World.here().alone else 1
    if count < 2:
        return {}
    every = f"torchrun --nproc_per_node {count} -m hf_mps.finetune … trains on all"
    return {"gpus": Choice(f"1 of {count}", f"the first, CUDA_VISIBLE_DEVICES names another; {every}")}


def _setting(training: Mapping[str, Any], key: str, default: Any, reason: str) -> Choice[Any]:
    """Return what `training` says of `key`, or else the default with its reason."""
    return Choice(training[key], SAID) if key in training else Choice(default, reason)


def precision_of(training: Mapping[str, Any], device_type: str) -> tuple[Choice[str], dict[str, Any]]:
    """Choose fp32, bf16 or fp16, with the arguments for Trainer. Raises UserError for one that the device lacks."""
    from hf_mps.device import precision

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


def _cadence(training: dict[str, Any], steps: int, choices: dict[str, Choice[Any]], streamed: bool) -> dict[str, Any]:
    """Choose when to report, to evaluate and to keep a checkpoint."""
    every = next(n * 10**power for power in range(9) for n in (1, 2, 5) if n * 10**power * ROWS_SHOWN >= steps)
    settled = {"logging_steps": every, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2}
    reason = "the default: after each epoch"
    if streamed:
        often, reason = pace.cadence(steps)
        settled |= often
    if "save_total_limit" not in training and training.get("save_strategy") == "no":
        del settled["save_total_limit"]
    choices["evaluation"] = _setting(training, "eval_strategy", settled["eval_strategy"], reason)
    reason += f", the newest {training.get('save_total_limit', 2)} kept"
    choices["checkpoints"] = _setting(training, "save_strategy", settled["save_strategy"], reason)
    # The filter replaces a NaN loss by the mean of the others, and waits for the device at every step to do so.
    settled["logging_nan_inf_filter"] = False
    reason = "a NaN loss stops the run, and no step waits for the device to look for one"
    choices["logging_nan_inf_filter"] = _setting(training, "logging_nan_inf_filter", False, reason)
    return settled


def _kept_model(
    training: dict[str, Any], prepared: Prepared, patience: int | None, choices: dict[str, Choice[Any]]
) -> dict[str, Any]:
    """Choose which weights end up in the output folder, and which metric picks the best ones."""
    metric, greater = best_metric(training, prepared)
    best = training.get("load_best_model_at_end", patience is not None)
    if patience is not None:
        choices["early_stopping"] = Choice(f"after {patience} evaluations without a better {metric}", SAID)
    reason = "the default: the validation rows pick nothing, so their score is fair"
    if best:
        reason = "early_stopping_patience in the recipe: the best so far"
    reason = SAID if "load_best_model_at_end" in training else reason
    choices["kept_model"] = Choice(f"best by {metric}" if best else "last", reason)
    settled: dict[str, Any] = {"load_best_model_at_end": True} if best else {}
    if patience is not None:  # a resumed run has as much patience left as it had
        settled["restore_callback_states_from_checkpoint"] = True
    if best or training.get("save_strategy") == "best" or "metric_for_best_model" in training:
        # Trainer takes every number but a loss for better the greater it is, an error rate too.
        settled |= {"metric_for_best_model": metric, "greater_is_better": greater}
        settled |= _plateau(training, metric, greater)
    return settled


def best_metric(training: Mapping[str, Any], prepared: Prepared) -> tuple[str, bool]:
    """Return the metric that picks the best weights, without `eval_`, and whether a greater value is better.

    That is the recipe's `metric_for_best_model`, else the task's first metric. Raises UserError for a name that no
    evaluation during the training has, and for a `greater_is_better` that reverses the metric.
    """
    asked = training.get("metric_for_best_model")
    name = prepared.metrics.main if asked is None else str(asked).removeprefix("eval_")
    known = list(dict.fromkeys((*prepared.metrics.reported, LOSS)))
    if name not in known:
        raise UserError(
            f"training.metric_for_best_model is '{asked}'; allowed: {', '.join(known)}{_further(name, prepared)}"
            f"{nearest(name, known)}"
        )
    greater = name != LOSS and name not in LOWER_IS_BETTER
    wanted = training.get("greater_is_better")
    if wanted is not None and wanted != greater:
        sense = "greater" if greater else "smaller"
        raise UserError(
            f"training.greater_is_better is {str(wanted).lower()}, and {name} is better the {sense} it is; leave it out"
        )
    return name, greater


def _further(name: str, prepared: Prepared) -> str:
    """Return what to say of a metric of a split that is measured only once."""
    split = next((split for split in prepared.further if name.startswith(f"{split}_")), None)
    return f"; {split} is measured once, after the training" if split is not None else ""


def _plateau(training: Mapping[str, Any], name: str, greater: bool) -> dict[str, Any]:
    """Return Trainer's keywords for a schedule that waits for `name` to improve: PyTorch's default waits for less of
    it.

    Empty for any other schedule. Raises UserError where the recipe's `lr_scheduler_kwargs` would wait for worse.
    """
    given = training.get("lr_scheduler_kwargs")
    if training.get("lr_scheduler_type") != "reduce_lr_on_plateau":
        return {}
    mode = "max" if greater else "min"
    if given is None:
        return {"lr_scheduler_kwargs": {"mode": mode}}
    if isinstance(given, dict) and given.get("mode", "min") != mode:
        sense = "greater" if greater else "smaller"
        came = f"mode {given['mode']}" if "mode" in given else "no mode (PyTorch takes min)"
        raise UserError(
            f"training.lr_scheduler_kwargs has {came}, and {name} is better the {sense} it is; allowed: mode: {mode}"
        )
    return {}


def _device_settings(
    training: dict[str, Any], device_type: str, prepared: Prepared, choices: dict[str, Choice[Any]]
) -> dict[str, Any]:
    """Return the data loader's settings that depend on the device."""
    pinned = device_type == "cuda"
    reason = "CUDA copies faster from pinned memory" if pinned else f"{device_type} cannot use pinned memory"
    choices["pin_memory"] = _setting(training, "dataloader_pin_memory", pinned, reason)
    reason = "the training process prepares its rows itself; training.dataloader_num_workers=2 has others do it ahead"
    if prepared.token_counts is not None:
        reason = "tokenised rows are read from memory-mapped files, faster than from another process"
    workers = Choice(0, reason) if prepared.stream is None else pace.workers()
    choices["workers"] = _setting(training, "dataloader_num_workers", workers.value, workers.reason)
    if prepared.stream is not None:
        choices["readers"] = pace.readers(prepared.stream, choices["workers"].value)
    settled: dict[str, Any] = {"dataloader_pin_memory": pinned, "dataloader_num_workers": workers.value}
    # A copy that waits for the device ends what the processor has prepared ahead, batch by batch.
    return settled | ({"accelerator_config": {"non_blocking": True}} if pinned else {})


def _fused_step(recipe: Recipe, model: Any, device_type: str) -> Choice[str]:
    """Choose what a step does with fewer launches."""
    from hf_mps.step import switch

    if recipe.fused_step is None and not recipe.speedups:
        return Choice(switch.OFF, "speedups is false in the recipe")
    return switch.choose(recipe.fused_step, model, device_type)


def _optimizer(training: dict[str, Any]) -> Choice[str]:
    rate = training.get("learning_rate", 5e-5)
    if "optim" in training:
        return Choice(training["optim"], f"{SAID}; learning rate {rate:g}")
    from transformers import TrainingArguments

    return Choice(str(TrainingArguments.default_optim), f"Trainer's default; learning rate {rate:g}")
