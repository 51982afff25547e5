"""What a run refuses of a valid recipe before anything is made: options that it would ignore or cannot honour."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import first_line
from hf_mps.finetune.models import checkpoint, quantization
from hf_mps.finetune.recipe import catalogue, expect, overrides
from hf_mps.finetune.recipe.overrides import Document
from hf_mps.finetune.recipe.resolve import Problem, examine, read
from hf_mps.finetune.recipe.schema import PLAIN_TEMPLATE, Recipe
from hf_mps.metal.device.no_modes import no_modes

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
    if recipe is not None:
        every += [Problem(document.where(key), "", text) for key, text in _of_recipe(recipe, document)]
    # A dict keeps one of equal sentences, the first, as it is filled from behind.
    return list({problem.text: problem for problem in reversed(every)}.values())[::-1]


def _of_recipe(recipe: Recipe, document: Document) -> Iterator[tuple[str, str]]:
    """Yield what can be refused without rows or a device: the key to blame, and a sentence."""
    from hf_mps.finetune.data import load
    from hf_mps.finetune.stream import pace
    from hf_mps.finetune.text import chat

    template, patience = getattr(recipe, "chat_template", None), recipe.early_stopping_patience
    checks: dict[str, Callable[[], object]] = {
        "model": lambda: quantization.refuse_stored(
            recipe.model, checkpoint.resolve(recipe.model).stored_config(), getattr(recipe, quantization.KEY, None)
        ),
        "model_type": lambda: refuse_another_type(recipe.model_type, checkpoint.resolve(recipe.model)),
        "data": lambda: load.check(recipe.data),
        "early_stopping_patience": lambda: refuse_early_stopping(recipe.training, patience),
        "chat_template": lambda: template in (None, PLAIN_TEMPLATE) or chat.read_template(str(template)),
    }
    if recipe.data.streaming:
        checks["data.streaming"] = lambda: pace.refuse_endless(recipe)
    for key, check in checks.items():
        try:
            check()
        except UserError as error:
            yield key, str(error)
    yield from expect.unmeasured(recipe, sorted(document.overridden)).items()


def refuse_impossible(training: dict[str, Any], device_type: str) -> None:
    """Raise UserError for a `training` option that the present device would ignore or cannot honour.

    Also for a tracker that Trainer does not know, or whose package is not installed.
    """
    for key, why in CUDA_ALONE.items():
        if training.get(key) and device_type != "cuda":
            raise UserError(f"training.{key}: {why} and the device is {device_type}; leave it out")
    resumed = training.get("resume_from_checkpoint")
    if resumed is not None and not (Path(resumed).expanduser() / "trainer_state.json").is_file():
        allowed = "allowed: a run's checkpoint-N folder"
        raise UserError(f"training.resume_from_checkpoint: {resumed} is not a complete checkpoint; {allowed}")
    optimizer = str(training.get("optim", ""))
    if device_type == "mps":
        from hf_mps.layer.guards.platform.cuda import reason_against, unpaged  # which imports torch

        if against := reason_against(optimizer):
            other = unpaged(optimizer)
            allowed = f"next: training.optim={other}" if other else "allowed: adamw_torch, sgd, adafactor, …"
            raise UserError(f"training.optim={optimizer}: {against}; {allowed}")
    asked = training.get("report_to")
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


def refuse_early_stopping(training: dict[str, Any], patience: int | None) -> None:
    """Raise UserError for an `early_stopping_patience` that other training options leave without effect."""
    for key, value in (("eval_strategy", "no"), ("save_strategy", "no"), ("load_best_model_at_end", False)):
        if patience is not None and training.get(key) == value:
            words = f"training.{key}={str(value).lower()}"
            told = f"it compares evaluations and keeps the best checkpoint, and {words}"
            raise UserError(f"early_stopping_patience: {told}; leave one of them out")


def refuse_another_type(model_type: str | None, source: checkpoint.Checkpoint) -> None:
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
            told = f"is not an operator of PyTorch {metadata.version('torch')}{nearest(name, bare)}"
            way_on = "next: hf-mps audit RECIPE, which lists those that fall back"
            raise UserError(f"fallback has '{name}', which {told}; {way_on}")


def refuse_caches() -> None:
    """Raise UserError for a cache of Hugging Face's libraries that the environment names and that cannot be made."""
    for name in filter(os.environ.get, CACHES):
        path = Path(os.environ[name]).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"{name} is {path}, which cannot be made: {error.strerror}"
            raise UserError(f"{told}; allowed: a folder that can be written") from error


def refuse_unusable(args: Any, model: Any, steps: int) -> None:
    """Raise UserError for an optimizer or schedule that cannot be made, by making them for one weight.

    `args` are the training arguments of a run of `steps` steps. `model`, in which low-rank optimizers look for their
    layers, is not changed.
    """
    import torch
    from transformers import Trainer, get_scheduler

    given, options = args.optim_args, args.lr_scheduler_kwargs
    if given and any(part.count("=") != 1 for part in given.split(",")):
        raise UserError(f"training.optim_args is '{given}'; allowed: KEY=VALUE,KEY=VALUE")
    tried = f"training.optim={args.optim.value}" + (f" training.optim_args={given}" if given else "")
    weight, alone = torch.nn.Parameter(torch.zeros(1, device="cpu")), copy.copy(args)
    # A layer-wise one hangs hooks into the model; it takes the settings of the one that steps for all layers at once.
    alone.optim = type(args.optim)(args.optim.value.removesuffix("_layerwise"))
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(alone, model)
        if not issubclass(kind, torch.optim.Optimizer) or {"model", "params"} & settings.keys():
            kind, settings = torch.optim.SGD, {"lr": args.learning_rate}  # made of the model, which was looked at
        with no_modes():  # a plan's model is on `meta`, and bitsandbytes reads values of tensors that it makes
            optimizer = kind([weight], **settings)
        tried = f"training.lr_scheduler_type={args.lr_scheduler_type.value}"
        tried += f" with lr_scheduler_kwargs {options}" if options else ""
        warmup = args.get_warmup_steps(steps)
        made = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=options)
        for factor in getattr(made, "lr_lambdas", ()):
            factor(steps // 2)  # some read their options only at a later step
    except Exception as error:  # whatever the optimizer's own package or the schedule raises for what it is given
        raise UserError(f"{tried}: refused: {first_line(error)}") from error
