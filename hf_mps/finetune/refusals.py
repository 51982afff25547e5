"""Options of `training` that this run would ignore or cannot do, refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_mps.errors import UserError, nearest
from hf_mps.guards.cuda_optimizer import reason_against

# Where the package that a tracker of Trainer's needs is not called like the tracker.
PIP = {"azure_ml": "azureml-mlflow mlflow", "comet_ml": "comet-ml", "kubeflow": "kubeflow-trainer"}


def refuse_impossible(said: dict[str, Any], device_type: str) -> None:
    """Raise UserError for an option of `training` that the present device would ignore or cannot do."""
    where = f"the device is {device_type}"
    if said.get("tf32") and device_type != "cuda":
        raise UserError(f"training.tf32: it is a mode of NVIDIA's tensor cores and {where}; leave it out")
    if said.get("use_liger_kernel") and device_type != "cuda":
        raise UserError(f"training.use_liger_kernel: its kernels are for CUDA and {where}; leave it out")
    if said.get("dataloader_pin_memory") and device_type != "cuda":
        raise UserError(
            f"training.dataloader_pin_memory: only CUDA copies from pinned memory and {where}; leave it out"
        )
    resumed = said.get("resume_from_checkpoint")
    if resumed is not None and not (Path(resumed).expanduser() / "trainer_state.json").is_file():
        raise UserError(
            f"training.resume_from_checkpoint: {resumed} is no whole checkpoint; allowed: a run's checkpoint-N folder"
        )
    optimizer = str(said.get("optim", ""))
    against = reason_against(optimizer) if device_type == "mps" else ""
    if against:
        raise UserError(f"training.optim={optimizer}: {against}; allowed: adamw_torch, sgd, adafactor, …")
    _refuse_trackers(said.get("report_to"))


def refuse_early_stopping(said: dict[str, Any], patience: int | None) -> None:
    """Raise UserError for an `early_stopping_patience` that the training's own options leave without effect."""
    if patience is None:
        return
    for key, value in (("eval_strategy", "no"), ("save_strategy", "no"), ("load_best_model_at_end", False)):
        if said.get(key) == value:
            words = f"training.{key}={str(value).lower()}"
            raise UserError(
                f"early_stopping_patience: it compares evaluations and keeps the best checkpoint, and {words};"
                f" leave one of them out"
            )


def _refuse_trackers(asked: Any) -> None:
    """Raise UserError for a tracker that Trainer does not know, or whose package is not installed."""
    wanted = [asked] if isinstance(asked, str) else list(asked or ())
    if wanted in ([], ["none"], ["all"]):
        return
    from transformers.integrations import integration_utils as theirs

    known = sorted(theirs.INTEGRATION_TO_CALLBACK)
    # Flyte's is the one that the library's own list of what is installed leaves out.
    installed = {*theirs.get_available_reporting_integrations(), "flyte"}
    for name in wanted:
        if name not in known:
            allowed = f"none, all, {', '.join(known)}"
            raise UserError(f"training.report_to is '{name}'; allowed: {allowed}{nearest(name, known)}")
        if name not in installed:
            raise UserError(f"training.report_to={name}: it is not installed; next: pip install {PIP.get(name, name)}")
