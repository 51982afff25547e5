"""The fields of transformers' TrainingArguments, known without importing transformers or torch.

The installed file is parsed, not imported: names, annotations and values are those of the version that will run.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_mps.errors import UserError, nearest
from hf_mps.translate import table

# What took the place of a name that transformers 5 removed; used only where the installed version lacks the name.
REMOVED = {name: old.instead for name, old in table.REMOVED.items()} | {
    "overwrite_output_dir": "nothing: a run never writes over another; output_dir names a new folder",
    "push_to_hub_token": "nothing: a recipe holds no token; log in once with: hf auth login",
    "tokenizer": "nothing: the runner passes processing_class itself",
}

# Names of TrainingArguments that a recipe says elsewhere, or that Trainer itself never reads.
ELSEWHERE = {
    "output_dir": "it stands at the top level of a recipe: output_dir: PATH",
    "seed": "it stands at the top level of a recipe: seed: N",
    "do_train": "Trainer never reads it; a recipe always trains",
    "do_eval": "Trainer never reads it; eval_strategy says when to evaluate",
    "do_predict": "Trainer never reads it; leave it out",
    "hub_token": "a recipe holds no token; log in once with: hf auth login",
    "push_to_hub": "the runner keeps its files here; next, after the run: hf upload NAME OUTPUT_DIR",
    "hub_private_repo": "it belongs to push_to_hub, which the runner leaves to: hf upload NAME OUTPUT_DIR",
    "hub_model_id": "it belongs to push_to_hub, which the runner leaves to: hf upload NAME OUTPUT_DIR",
    "hub_strategy": "it belongs to push_to_hub, which the runner leaves to: hf upload NAME OUTPUT_DIR",
    "hub_always_push": "it belongs to push_to_hub, which the runner leaves to: hf upload NAME OUTPUT_DIR",
    "hub_revision": "it belongs to push_to_hub, which the runner leaves to: hf upload NAME OUTPUT_DIR",
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
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_steps": 0,
    "label_smoothing_factor": 0,
    "logging_steps": 0,
    "eval_steps": 0,
    "save_steps": 0,
    "save_total_limit": 1,
    "dataloader_num_workers": 0,
}

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


@dataclass(frozen=True)
class Field:
    """A field of TrainingArguments: its name, its annotation as written, and its values where they are listed."""

    name: str
    annotation: str
    values: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def fields() -> dict[str, Field]:
    """Every field of the installed TrainingArguments by name.

    Raises UserError where transformers is not installed or no longer keeps the class in training_args.py.
    """
    source = _package() / "training_args.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if "TrainingArguments" not in bodies:
        raise UserError(f"{source} holds no TrainingArguments; next: pip install --upgrade hf-mps")
    enums = _enums(tree) | _enums(ast.parse((_package() / "trainer_utils.py").read_text(encoding="utf-8")))
    found = {}
    for node in bodies["TrainingArguments"].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = _names(node.annotation)
            values = [value for name in names for value in enums.get(name, ())] or _choices(node.value)
            found[node.target.id] = Field(node.target.id, ast.unparse(node.annotation), tuple(values))
    return found


def problems(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with a recipe's `training` section: pairs of a key and one clause; empty where all is well."""
    known = fields()
    found = []
    for key, value in training.items():
        if key in ELSEWHERE:
            found.append((key, f"is not set here: {ELSEWHERE[key]}"))
        elif key not in known:
            found.append((key, _unknown(key, known)))
        elif value is not None and (problem := _mismatch(known[key], value)):
            found.append((key, problem))
    return found


def _unknown(key: str, known: Mapping[str, Field]) -> str:
    if key in REMOVED:
        return f"was removed in transformers 5; in its place: {REMOVED[key]}"
    allowed = [name for name in known if name not in ELSEWHERE]
    return f"is no field of TrainingArguments; allowed: its {len(allowed)} fields{nearest(key, allowed)}"


def _mismatch(field: Field, value: Any) -> str:
    """One clause where `value` cannot be what the field's annotation says, otherwise an empty string."""
    if field.values and isinstance(value, str):
        if value in field.values:
            return ""
        return f"is '{value}'; allowed: {', '.join(field.values)}{nearest(value, field.values)}"
    names = _names(ast.parse(field.annotation, mode="eval").body)
    types = tuple(kind for name in names for kind in _TYPES.get(name, ()))
    if not types or any(name not in _TYPES and not field.values and name != "Literal" for name in names):
        return ""  # a class of transformers' own: left to TrainingArguments, which checks it at the start of the run
    fits = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    if fits or (value is False and "Literal" in names):
        return _out_of_range(field.name, value)
    allowed = " or ".join(name for name in names if name in _TYPES and name != "None")
    return f"is {value!r}; allowed: {', '.join(field.values) if field.values else allowed}"


def _out_of_range(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if not math.isfinite(value):
        return f"is {value}; allowed: a finite number"
    if name == "num_train_epochs" and value <= 0:
        return f"is {value}; allowed: a number above 0"
    if name in LOWEST and value < LOWEST[name]:
        return f"is {value}; allowed: {LOWEST[name]} or more"
    return ""


def _package() -> Path:
    spec = find_spec("transformers")  # finds the folder without running the package's code
    if spec is None or spec.origin is None:
        raise UserError("transformers is not installed; next: pip install 'transformers>=5'")
    return Path(spec.origin).parent


def _names(annotation: ast.expr) -> list[str]:
    """The names on the top level of a union: `dict[str, Any] | str | None` gives dict, str and None."""
    if isinstance(annotation, ast.BinOp):
        return _names(annotation.left) + _names(annotation.right)
    if isinstance(annotation, ast.Subscript):
        outer = _names(annotation.value)
        if outer in (["Optional"], ["Union"]):
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return [name for part in inner for name in _names(part)] + (["None"] if outer == ["Optional"] else [])
        return outer
    if isinstance(annotation, ast.Constant):
        return [str(annotation.value)]
    return [annotation.id] if isinstance(annotation, ast.Name) else [ast.unparse(annotation)]


def _enums(tree: ast.Module) -> dict[str, list[str]]:
    """The string values of each Enum class in a module."""
    return {
        node.name: [
            item.value.value
            for item in node.body
            if isinstance(item, ast.Assign)
            and isinstance(item.value, ast.Constant)
            and isinstance(item.value.value, str)
        ]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases)
    }


def _choices(value: ast.expr | None) -> list[str]:
    """The `choices` list in a field's metadata, where it is written out."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            for key, item in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(item, ast.List):
                    return [str(choice.value) for choice in item.elts if isinstance(choice, ast.Constant)]
    return []
