"""What a run refuses of a valid recipe before anything is made: options that it would ignore or cannot honour."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.models import checkpoint, quantization
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import catalogue, expect, overrides
from hf_mps.finetune.recipe.problems import Problem
from hf_mps.finetune.recipe.resolve import examine, read
from hf_mps.finetune.recipe.schema import PLAIN_TEMPLATE, Recipe
from hf_mps.layer.guards.platform.cuda import reason_against

# The folders that Hugging Face's libraries keep rows and models in, where the environment names them.
CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")

# Options that another device than CUDA's ignores, and why.
CUDA_ALONE = {
    "tf32": "it is a mode of NVIDIA's tensor cores",
    "use_liger_kernel": "its kernels are for CUDA",
    "dataloader_pin_memory": "only CUDA copies from pinned memory",
}
# Where the package that a tracker of Trainer's needs is not called like the tracker.
PIP = {"azure_ml": "azureml-mlflow mlflow", "comet_ml": "comet-ml", "kubeflow": "kubeflow-trainer"}


def problems(name: str, words: Sequence[str] = ()) -> list[Problem]:
    """Return everything that is wrong with the recipe called `name` and the overrides `words`, with file and line.

    That is more than a run reports at first: repeated keys, missing files and folders. Where a library is not
    installed, what it alone could check is `unchecked`. Imports no torch.
    """
    try:
        path = catalogue.find(name).path
        document = read(path, lenient=True)
        document = overrides.lay(document, overrides.parse(words, document.values.get("task")))
    except UserError as error:
        return [Problem("", "", str(error))]
    recipe, wrong = examine(document)
    every = [*(Problem(f"{path}:{line}", "", text) for line, text in document.twice), *wrong]
    for key, check in _of_recipe(recipe, sorted(document.overridden)).items() if recipe is not None else ():
        try:
            check()
        except UserError as error:
            every.append(Problem(document.where(key), "", str(error)))
    first: dict[str, Problem] = {}
    for problem in every:
        first.setdefault(problem.text, problem)
    return list(first.values())


def _of_recipe(recipe: Recipe, changed: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Yield what can be refused without rows or a device, by the key to blame."""
    from hf_mps.finetune.data import load
    from hf_mps.finetune.stream import pace
    from hf_mps.finetune.text import chat

    checks: dict[str, Callable[[], object]] = {
        "model": lambda: quantization.refuse_stored(
            recipe.model, checkpoint.resolve(recipe.model).stored_config(), getattr(recipe, quantization.KEY, None)
        ),
        "model_type": lambda: refuse_another_type(recipe.model_type, checkpoint.resolve(recipe.model)),
        "data": lambda: load.check(recipe.data),
        "expect": lambda: expect.refuse_unknown(recipe, changed),
        "training.metric_for_best_model": lambda: expect.refuse_unknown_best(recipe),
        "data.streaming": lambda: pace.refuse_endless(recipe),
        "early_stopping_patience": lambda: refuse_early_stopping(recipe.training, recipe.early_stopping_patience),
    }
    if (template := getattr(recipe, "chat_template", None)) not in (None, PLAIN_TEMPLATE):
        checks["chat_template"] = lambda: chat.read_template(template)
    return checks


def refuse_impossible(training: dict[str, Any], device_type: str) -> None:
    """Raise UserError for a `training` option that the present device would ignore or cannot honour."""
    for key, why in CUDA_ALONE.items():
        if training.get(key) and device_type != "cuda":
            raise UserError(f"training.{key}: {why} and the device is {device_type}; leave it out")
    resumed = training.get("resume_from_checkpoint")
    if resumed is not None and not (Path(resumed).expanduser() / "trainer_state.json").is_file():
        raise UserError(
            f"training.resume_from_checkpoint: {resumed} is no whole checkpoint; allowed: a run's checkpoint-N folder"
        )
    optimizer = str(training.get("optim", ""))
    against = reason_against(optimizer) if device_type == "mps" else ""
    if against:
        raise UserError(f"training.optim={optimizer}: {against}; allowed: adamw_torch, sgd, adafactor, …")
    _refuse_trackers(training.get("report_to"))


def refuse_early_stopping(training: dict[str, Any], patience: int | None) -> None:
    """Raise UserError for an `early_stopping_patience` that other training options leave without effect."""
    if patience is None:
        return
    for key, value in (("eval_strategy", "no"), ("save_strategy", "no"), ("load_best_model_at_end", False)):
        if training.get(key) == value:
            words = f"training.{key}={str(value).lower()}"
            raise UserError(
                f"early_stopping_patience: it compares evaluations and keeps the best checkpoint, and {words};"
                f" leave one of them out"
            )


def refuse_another_type(model_type: str | None, source: Checkpoint) -> None:
    """Raise UserError for a `model_type` that contradicts the checkpoint's configuration.

    Reads the configuration of a local folder; that of a hub id is the hub's.
    """
    own = source.stored_config().get("model_type") if model_type is not None and source.local else None
    if own is not None and own != model_type:
        raise UserError(f"model_type is {model_type}, and {source.name} holds a {own}; leave model_type out")


def refuse_unknown_operators(named: Sequence[str]) -> None:
    """Raise UserError for a name in `fallback` that no library imported so far has."""
    from torch import _C

    known = set(_C._dispatch_get_all_op_names()) if named else set()
    bare = {name.partition(".")[0] for name in known}
    for name in named:
        if name not in known and name not in bare:
            which = f"which is no operator of PyTorch {metadata.version('torch')}{nearest(name, bare)}"
            raise UserError(
                f"fallback has '{name}', {which}; next: hf-mps audit RECIPE, which lists those that fall back"
            )


def refuse_caches() -> None:
    """Raise UserError for a cache of Hugging Face's libraries that the environment names and that cannot be made."""
    named = [name for name in CACHES if os.environ.get(name)]
    for name in named:
        path = Path(os.environ[name]).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{name} is {path}, which cannot be made: {error.strerror}; allowed: a folder that can be written"
            ) from error


def _refuse_trackers(asked: Any) -> None:
    """Raise UserError for a tracker that Trainer does not know, or whose package is not installed."""
    trackers = [asked] if isinstance(asked, str) else list(asked or ())
    if trackers in ([], ["none"], ["all"]):
        return
    from transformers.integrations import integration_utils as theirs

    known = sorted(theirs.INTEGRATION_TO_CALLBACK)
    # Flyte's is the one that the library's own list of what is installed leaves out.
    installed = {*theirs.get_available_reporting_integrations(), "flyte"}
    for name in trackers:
        if name not in known:
            allowed = f"none, all, {', '.join(known)}"
            raise UserError(f"training.report_to is '{name}'; allowed: {allowed}{nearest(name, known)}")
        if name not in installed:
            raise UserError(f"training.report_to={name}: it is not installed; next: pip install {PIP.get(name, name)}")
