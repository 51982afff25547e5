"""A recipe's `training` section: fields of the task's training arguments, of their types and within range.

The installed file of the class is parsed, not imported: names, annotations and values are those of the version that
will run, and neither transformers nor torch is loaded.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_mps.core import extras
from hf_mps.core.errors import LARGEST_BATCH, UserError, nearest
from hf_mps.finetune import sharding
from hf_mps.layer.compat import removed_arguments

Source = tuple[str, str]
"""A file's path inside site-packages, and the class in it."""

TRAINING_ARGUMENTS: Source = ("transformers/training_args.py", "TrainingArguments")
# Ends a first sentence, and no abbreviation: `e.g.` goes on in small letters.
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
UTILITIES = "transformers/trainer_utils.py"
EXTRA = {"sentence_transformers": "embeddings", "trl": "preference"}


@dataclass(frozen=True)
class Field:
    """A field: its name, its annotation as written, its values where they are listed, and its help's first sentence."""

    name: str
    annotation: str
    values: tuple[str, ...] = ()
    meaning: str = ""

    @property
    def types(self) -> list[str]:
        """Return the names on the top level of its annotation."""
        return types(ast.parse(self.annotation, mode="eval").body)


@lru_cache(maxsize=8)
def fields(source: Source = TRAINING_ARGUMENTS) -> dict[str, Field]:
    """Return every field of the installed class by name, inherited ones first.

    Raises UserError where the library is not installed, or the file no longer has the class or one of its bases.
    """
    path = _file(source[0])
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if source[1] not in classes:
        raise UserError(f"{path} holds no {source[1]}; next: pip install --upgrade hf-mps")
    body = classes[source[1]]
    by_name: dict[str, Field] = {}
    for base in body.bases:
        if (above := _base(base, source[0], tree, classes)) is not None:
            by_name |= fields(above)
    enums = _enums(tree) | _enums(ast.parse(_file(UTILITIES).read_text(encoding="utf-8")))
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = types(node.annotation)
            if "ClassVar" in names:
                continue
            metadata = _metadata(node.value)
            choices = metadata.get("choices")
            listed = choices.elts if isinstance(choices, ast.List) else ()
            values = [value for name in names for value in enums.get(name, ())]
            values = values or [str(one.value) for one in listed if isinstance(one, ast.Constant)]
            said = metadata.get("help")
            words = " ".join(str(said.value).split()) if isinstance(said, ast.Constant) else ""
            meaning = SENTENCE.split(words)[0].rstrip(".")
            by_name[node.target.id] = Field(node.target.id, ast.unparse(node.annotation), tuple(values), meaning)
    return by_name


def types(annotation: ast.expr) -> list[str]:
    """Return the names on the top level of a union: `dict[str, Any] | str | None` gives dict, str and None."""
    if isinstance(annotation, ast.BinOp):
        return types(annotation.left) + types(annotation.right)
    if isinstance(annotation, ast.Subscript):
        outer = types(annotation.value)
        if outer in (["Optional"], ["Union"]):
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return [name for part in inner for name in types(part)] + (["None"] if outer == ["Optional"] else [])
        return outer
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):  # an annotation in quotes
            return types(ast.parse(annotation.value, mode="eval").body)
        return [str(annotation.value)]
    return [annotation.id] if isinstance(annotation, ast.Name) else [ast.unparse(annotation)]


def _base(base: ast.expr, file: str, tree: ast.Module, classes: dict[str, ast.ClassDef]) -> Source | None:
    """Return where a base class is: in the same file, or in the one that it is imported from; None for a builtin."""
    name = ast.unparse(base)
    if name in classes:
        return file, name
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if (alias.asname or alias.name) != name:
                continue
            assert isinstance(node, ast.ImportFrom)
            if node.module == "transformers" and alias.name == "TrainingArguments":
                return TRAINING_ARGUMENTS  # a lazy package: its __init__ does not say where the class is
            folder = list(Path(file).parts[: -node.level] if node.level else ())
            return "/".join([*folder, *(node.module or "").split(".")]) + ".py", alias.name
    return None


def _file(place: str) -> Path:
    """Return where the file at `place` is installed. Raises UserError where its package is not."""
    package, _, rest = place.partition("/")
    spec = find_spec(package)  # finds the folder without running the package's code
    if spec is None or spec.origin is None:
        way_on = extras.install(EXTRA[package]) if package in EXTRA else f"pip install {package}"
        raise UserError(f"{package} is not installed; next: {way_on}")
    return Path(spec.origin).parent / rest


def _enums(tree: ast.Module) -> dict[str, list[str]]:
    """Return the string values of each Enum class in a module."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Enum") for base in node.bases):
            values = [item.value for item in node.body if isinstance(item, ast.Assign)]
            constants = [value.value for value in values if isinstance(value, ast.Constant)]
            found[node.name] = [value for value in constants if isinstance(value, str)]
    return found


def _metadata(value: ast.expr | None) -> dict[str, ast.expr]:
    """Return a field's metadata as written, by its keys."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            both = zip(node.keys, node.values, strict=True)
            return {key.value: one for key, one in both if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return {}


# Fields that transformers 5.23 gave new names (new: old). Both are taken from a recipe, and the old ones warn there.
RENAMED = {f"activation_checkpointing{end}": f"gradient_checkpointing{end}" for end in ("", "_kwargs")}

# What took the place of a name that transformers 5 removed; used only where the installed version lacks the name.
REMOVED = {name: old.instead for name, old in removed_arguments.REMOVED.items()} | {
    "overwrite_output_dir": "nothing: a run never writes over another; output_dir names a new folder",
    "push_to_hub_token": "nothing: a recipe holds no token; log in once with: hf auth login",
    "tokenizer": "nothing: the runner passes processing_class itself",
}

# Sharing is a step by itself, after a look at the result. The verb leaves out what names paths of this machine.
PUSH = "hf-mps push {} OWNER/NAME"
HUB = "it belongs to push_to_hub, which the runner leaves to: hf-mps push"
OURS = "the runner sets it for its processes itself; leave it out"
SEVERAL = "the runner divides a model by FSDP alone: training.fsdp=true"
FSDP = ("fsdp", "fsdp_config")
# Names of TrainingArguments that a recipe says elsewhere, or that Trainer itself never reads.
ELSEWHERE = {
    "output_dir": "it is a top-level key of a recipe: output_dir: PATH",
    "seed": "it is a top-level key of a recipe: seed: N",
    "do_train": "Trainer never reads it; a recipe always trains",
    "do_eval": "Trainer never reads it; eval_strategy says when to evaluate",
    "do_predict": "Trainer never reads it; leave it out",
    "hub_token": "a recipe holds no token; log in once with: hf auth login",
    "push_to_hub": f"the runner keeps its files here; next, after the run: {PUSH.format('OUTPUT_DIR')}",
    **dict.fromkeys(("hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), HUB),
    "disable_tqdm": "the runner's own lines take the bar's place, and are plain where stdout is no terminal",
    **dict.fromkeys(("local_rank", "log_on_each_node", "log_level_replica", "save_on_each_node"), OURS),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), OURS),
    **dict.fromkeys(("ddp_static_graph", "ddp_backend"), OURS),
    **dict.fromkeys(("deepspeed", "parallelism_config"), SEVERAL),
    "average_tokens_across_devices": "the runner trains on one device; leave it out",
    "batch_eval_metrics": "metrics are computed over the whole split; leave it out",
    "prediction_loss_only": "it would leave out the metrics that a recipe is measured by; leave it out",
    "remove_unused_columns": "the runner hands Trainer only the model's own columns; leave it out",
    "label_names": "the task names its label column itself; leave it out",
    "include_for_metrics": "the task's metrics need predictions and labels alone; leave it out",
}

# The rows of a batch where neither recipe nor task says how many: what Hugging Face's GLUE examples use.
DEFAULT_BATCH = 32

# Fields whose lowest sensible number TrainingArguments does not check before the run has begun.
LOWEST = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 1),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps"), 1),
    **dict.fromkeys(("save_total_limit", "dataloader_prefetch_factor", "ddp_timeout"), 1),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "adam_epsilon"), 0),
    **dict.fromkeys(("logging_steps", "eval_steps", "eval_delay", "save_steps"), 0),
    **dict.fromkeys(("dataloader_num_workers", "neftune_noise_alpha"), 0),
}
# Fields with a most.
MOST = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), LARGEST_BATCH),
    "gradient_accumulation_steps": LARGEST_BATCH,
    "dataloader_num_workers": 1_000,
}
# Shares of 1 that may not be the whole: PyTorch refuses such betas when the optimizer is made, a smoothing of 1 or more
# teaches the other classes.
BELOW_ONE = ("label_smoothing_factor", "adam_beta1", "adam_beta2")

# The Python types that a YAML value may have for each name in an annotation, and the name in words, as other keys of
# a recipe have them. A bool is no number here.
KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "dict": ((dict,), "a section of keys, such as {a: b}"),
    "list": ((list,), "a list, such as [a, b]"),
    "None": ((type(None),), ""),
}


def checkpointing() -> str:
    """Return the installed TrainingArguments' name for gradient (activation) checkpointing."""
    return _installed("activation_checkpointing")


def installed(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `training` section under the names of the installed TrainingArguments."""
    return {_installed(key): value for key, value in training.items()}


def _installed(key: str) -> str:
    for new, old in RENAMED.items():
        if key in (new, old):
            return new if new in fields() else old
    return key


def set_elsewhere(settled: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Return the fields that a recipe sets elsewhere: ELSEWHERE, and `settled` of the `known` ones; `*` is any text."""
    matched = {name: why for pattern, why in settled.items() for name in fnmatch.filter(known, pattern)}
    return ELSEWHERE | dict(settled) | matched


def problems(
    said: Mapping[str, Any],
    source: Source | None = None,
    own: Mapping[str, str] | None = None,
    task: str = "RECIPE",
    called: Callable[[str], str] = lambda _: "",
) -> list[tuple[str, str]]:
    """Return what is wrong with a recipe's `training` section: pairs of a key and a clause; empty where nothing is.

    `source` is the class whose fields are allowed (None: TrainingArguments), `own` are fields that the task sets
    itself, each with where; `task` is whose keys a hint lists, `called` tells the key for what other tools call one.
    Raises UserError where the library of `source` is not installed.
    """
    source = source or TRAINING_ARGUMENTS
    known = fields(source)
    elsewhere = set_elsewhere(own or {}, known)
    wrong = []
    for key, value in said.items():
        if key in elsewhere:
            wrong.append((key, f"is not set here: {elsewhere[key]}"))
        elif (name := _installed(key)) not in known:
            names = [name for name in known if name not in elsewhere]
            more = f", to see all: hf-mps recipes keys {task}{nearest(key, names)}"
            other = called(f"training.{key}")
            hint = f"is not a field of {source[1]}; next{f': {other}={value}' if other else more}"
            removed = f"was removed in transformers 5; in its place: {REMOVED.get(key)}"
            wrong.append((key, removed if key in REMOVED else hint))
        elif RENAMED.get(key) in said:
            wrong.append((key, f"is the newer name of {RENAMED[key]}, which is here too; give one of them"))
        elif problem := sharding.problem(key, value) if key in FSDP else _mismatch(known[name], value):
            wrong.append((key, problem))
    return wrong


def allowed(field: Field) -> str:
    """Return what a field takes in plain words: its values, or their kinds; its annotation where that is a class."""
    kinds = [KINDS[name][1] for name in field.types if name in KINDS]
    return ", ".join(field.values) or " or ".join(filter(None, kinds)) or field.annotation


def _mismatch(field: Field, value: Any) -> str:
    """Return a clause where `value` contradicts the field's annotation, otherwise an empty string."""
    if value is None:
        return "" if "None" in field.types else f"is empty; allowed: {allowed(field)}"
    if field.values and isinstance(value, str):
        near = nearest(value, field.values)
        return "" if value in field.values else f"is '{value}'; allowed: {allowed(field)}{near}"
    kinds = tuple(kind for name in field.types for kind in KINDS.get(name, ((), ""))[0])
    if not kinds or any(name not in KINDS and not field.values and name != "Literal" for name in field.types):
        return ""  # a class of transformers' own: left to TrainingArguments, which checks it at the start of the run
    fits = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    if fits or (value is False and "Literal" in field.types):
        return _out_of_range(field.name, value)
    return f"is {value!r}; allowed: {allowed(field)}"


def _out_of_range(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    least, most = LOWEST.get(name, -math.inf), MOST.get(name, math.inf)
    refused = {
        "a finite number": not math.isfinite(value),
        "a number above 0": name == "num_train_epochs" and value <= 0,
        "1 or more, or -1 for as many as num_train_epochs has": name == "max_steps" and value < 1 and value != -1,
        "0 or more and less than 1": name in BELOW_ONE and not 0 <= value < 1,
        f"{least} or more": value < least,
        f"up to {most:,}": value > most,
    }
    return next((f"is {value}; allowed: {words}" for words, wrong in refused.items() if wrong), "")
