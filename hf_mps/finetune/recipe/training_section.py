"""What a recipe's `training` section may say: fields of the task's training arguments, of their types and in range."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from hf_mps.compat import removed_arguments
from hf_mps.core.errors import nearest
from hf_mps.finetune.recipe.fields import TRAINING_ARGUMENTS, Field, Source, fields, types

__all__ = [
    "ELSEWHERE",
    "REMOVED",
    "TRAINING_ARGUMENTS",
    "Field",
    "Source",
    "checkpointing",
    "fields",
    "installed",
    "problems",
]

# Fields that transformers 5.23 gave new names (new: old). Both are taken from a recipe, and the old ones warn there.
RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}

# What took the place of a name that transformers 5 removed; used only where the installed version lacks the name.
REMOVED = {name: old.instead for name, old in removed_arguments.REMOVED.items()} | {
    "overwrite_output_dir": "nothing: a run never writes over another; output_dir names a new folder",
    "push_to_hub_token": "nothing: a recipe holds no token; log in once with: hf auth login",
    "tokenizer": "nothing: the runner passes processing_class itself",
}

# Sharing is a step of its own, after a look at the result: no token passes through here. The recipe in a run's own
# folder names paths of this machine, and checkpoints hold the optimizer's state: neither is for the hub.
UPLOAD = "hf upload NAME {} . --exclude 'checkpoint-*' --exclude recipe.yaml"

# Names of TrainingArguments that a recipe says elsewhere, or that Trainer itself never reads.
ELSEWHERE = {
    "output_dir": "it stands at the top level of a recipe: output_dir: PATH",
    "seed": "it stands at the top level of a recipe: seed: N",
    "do_train": "Trainer never reads it; a recipe always trains",
    "do_eval": "Trainer never reads it; eval_strategy says when to evaluate",
    "do_predict": "Trainer never reads it; leave it out",
    "hub_token": "a recipe holds no token; log in once with: hf auth login",
    "push_to_hub": f"the runner keeps its files here; next, after the run: {UPLOAD.format('OUTPUT_DIR')}",
    "hub_private_repo": "it belongs to push_to_hub, which the runner leaves to: hf upload",
    "hub_model_id": "it belongs to push_to_hub, which the runner leaves to: hf upload",
    "hub_strategy": "it belongs to push_to_hub, which the runner leaves to: hf upload",
    "hub_always_push": "it belongs to push_to_hub, which the runner leaves to: hf upload",
    "hub_revision": "it belongs to push_to_hub, which the runner leaves to: hf upload",
    "disable_tqdm": "the runner's own lines take the bar's place, and are plain where stdout is no terminal",
    "local_rank": "the runner trains in one process; leave it out",
    "log_on_each_node": "the runner trains in one process; leave it out",
    "log_level_replica": "the runner trains in one process; leave it out",
    "save_on_each_node": "the runner trains in one process; leave it out",
    "fsdp": "it needs several processes, and the runner is one; use accelerate launch with a script",
    "fsdp_config": "it needs several processes, and the runner is one; use accelerate launch with a script",
    "deepspeed": "it needs several processes, and the runner is one; use accelerate launch with a script",
    "parallelism_config": "it needs several processes, and the runner is one; use accelerate launch with a script",
    "average_tokens_across_devices": "the runner trains on one device; leave it out",
    "ddp_find_unused_parameters": "the runner trains in one process; leave it out",
    "ddp_bucket_cap_mb": "the runner trains in one process; leave it out",
    "ddp_broadcast_buffers": "the runner trains in one process; leave it out",
    "ddp_static_graph": "the runner trains in one process; leave it out",
    "ddp_backend": "the runner trains in one process; leave it out",
    "ddp_timeout": "the runner trains in one process; leave it out",
    "batch_eval_metrics": "metrics are computed over the whole split; leave it out",
    "prediction_loss_only": "it would leave out the metrics that a recipe is measured by; leave it out",
    "remove_unused_columns": "the runner hands Trainer only the model's own columns; leave it out",
    "label_names": "the task names its label column itself; leave it out",
    "include_for_metrics": "the task's metrics need predictions and labels alone; leave it out",
}

# Fields whose lowest sensible number TrainingArguments does not check before the run has begun.
LOWEST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "eval_accumulation_steps": 1,
    "torch_empty_cache_steps": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_steps": 0,
    "adam_epsilon": 0,
    "logging_steps": 0,
    "eval_steps": 0,
    "eval_delay": 0,
    "save_steps": 0,
    "save_total_limit": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "neftune_noise_alpha": 0,
}
# Shares of 1 that may not be the whole: PyTorch refuses such betas when the optimizer is made, a smoothing of 1 or more
# teaches the other classes.
BELOW_ONE = ("label_smoothing_factor", "adam_beta1", "adam_beta2")

# Python types that a YAML value may have for each name in an annotation. A bool is no number here.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "dict": (dict,),
    "list": (list,),
    "None": (type(None),),
}
# The same types in words, as the other keys of a recipe have them.
WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "a section of keys, such as {a: b}",
    "list": "a list, such as [a, b]",
}


def checkpointing() -> str:
    """The name that the installed TrainingArguments has for keeping fewer activations, and computing them twice."""
    return _installed("activation_checkpointing")


def installed(training: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's `training` section under the names that the installed TrainingArguments has."""
    return {_installed(key): value for key, value in training.items()}


def _installed(key: str) -> str:
    for new, old in RENAMED.items():
        if key in (new, old):
            return new if new in fields() else old
    return key


def problems(
    training: Mapping[str, Any],
    source: Source | None = None,
    settled: Mapping[str, str] | None = None,
    *,
    task: str = "RECIPE",
) -> list[tuple[str, str]]:
    """What is wrong with a recipe's `training` section: pairs of a key and one clause; empty where all is well.

    `source` is the class whose fields are allowed (None: TrainingArguments), `settled` names fields that the task says
    itself, each with where; `task` is whose keys a hint lists. Raises UserError where the library of `source` is not
    installed.
    """
    source = source or TRAINING_ARGUMENTS
    known, elsewhere = fields(source), ELSEWHERE | dict(settled or {})
    found = []
    for key, value in training.items():
        if key in elsewhere:
            found.append((key, f"is not set here: {elsewhere[key]}"))
        elif (name := _installed(key)) not in known:
            allowed = [name for name in known if name not in elsewhere]
            found.append((key, _unknown(key, allowed, source[1], task)))
        elif RENAMED.get(key) in training:
            found.append((key, f"is the newer name of {RENAMED[key]}, which is here too; give one of them"))
        elif problem := _mismatch(known[name], value):
            found.append((key, problem))
    return found


def _unknown(key: str, allowed: list[str], kind: str, task: str) -> str:
    if key in REMOVED:
        return f"was removed in transformers 5; in its place: {REMOVED[key]}"
    return f"is no field of {kind}; next, to see all: hf-mps recipes keys {task}{nearest(key, allowed)}"


def in_words(field: Field) -> str:
    """The kinds of values that a field takes, as a person says them; its annotation where it is a class of its own."""
    names = types(ast.parse(field.annotation, mode="eval").body)
    return " or ".join(WORDS[name] for name in names if name in WORDS) or field.annotation


def _mismatch(field: Field, value: Any) -> str:
    """One clause where `value` cannot be what the field's annotation says, otherwise an empty string."""
    names = types(ast.parse(field.annotation, mode="eval").body)
    if value is None:
        return "" if "None" in names else f"is empty; allowed: {', '.join(field.values) or in_words(field)}"
    if field.values and isinstance(value, str):
        if value in field.values:
            return ""
        return f"is '{value}'; allowed: {', '.join(field.values)}{nearest(value, field.values)}"
    kinds = tuple(kind for name in names for kind in _TYPES.get(name, ()))
    if not kinds or any(name not in _TYPES and not field.values and name != "Literal" for name in names):
        return ""  # a class of transformers' own: left to TrainingArguments, which checks it at the start of the run
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if fits or (value is False and "Literal" in names):
        return _out_of_range(field.name, value)
    return f"is {value!r}; allowed: {', '.join(field.values) or in_words(field)}"


def _out_of_range(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if not math.isfinite(value):
        return f"is {value}; allowed: a finite number"
    if name == "num_train_epochs" and value <= 0:
        return f"is {value}; allowed: a number above 0"
    if name == "max_steps" and value < 1 and value != -1:
        return f"is {value}; allowed: 1 or more, or -1 for as many as num_train_epochs has"
    if name in BELOW_ONE and not 0 <= value < 1:
        return f"is {value}; allowed: 0 or more and less than 1"
    if name in LOWEST and value < LOWEST[name]:
        return f"is {value}; allowed: {LOWEST[name]} or more"
    return ""
