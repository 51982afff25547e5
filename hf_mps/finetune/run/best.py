"""By which number the best weights of a run are told, and whether more of it is better: known before the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.metrics.catalogue import LOWER_IS_BETTER

if TYPE_CHECKING:
    from hf_mps.finetune.tasks._base import Prepared

LOSS = "loss"


def settle(said: Mapping[str, Any], prepared: Prepared) -> tuple[str, bool]:
    """The number that tells the best weights, without `eval_`, and whether a greater one is better.

    That is the recipe's `metric_for_best_model`, else the task's first metric. Raises UserError for a name that no
    evaluation during the training has, and for a `greater_is_better` that turns the number's sense around.
    """
    asked = said.get("metric_for_best_model")
    name = prepared.metrics.main if asked is None else str(asked).removeprefix("eval_")
    known = list(dict.fromkeys((*prepared.metrics.reported, LOSS)))
    if name not in known:
        raise UserError(
            f"training.metric_for_best_model is '{asked}'; allowed: {', '.join(known)}{_further(name, prepared)}"
            f"{nearest(name, known)}"
        )
    greater = name != LOSS and name not in LOWER_IS_BETTER
    wanted = said.get("greater_is_better")
    if wanted is not None and wanted != greater:
        sense = "greater" if greater else "smaller"
        raise UserError(
            f"training.greater_is_better is {str(wanted).lower()}, and {name} is better the {sense} it is; leave it out"
        )
    return name, greater


def _further(name: str, prepared: Prepared) -> str:
    """What to say of a number of a split that is measured once alone."""
    split = next((split for split in prepared.further if name.startswith(f"{split}_")), None)
    return f"; {split} is measured once, after the training" if split is not None else ""


def plateau(said: Mapping[str, Any], name: str, greater: bool) -> dict[str, Any]:
    """Trainer's keywords for a schedule that waits for `name` to get better: PyTorch's own waits for less of it.

    Empty for another schedule. Raises UserError where the recipe's `lr_scheduler_kwargs` would have it wait for worse.
    """
    given = said.get("lr_scheduler_kwargs")
    if said.get("lr_scheduler_type") != "reduce_lr_on_plateau":
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
