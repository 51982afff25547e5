"""Which weights end up in the output folder, which metric picks them, and when a run stops early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan
from hf_mps.metrics.table import LOWER_IS_BETTER

if TYPE_CHECKING:
    from hf_mps.finetune.tasks._base import Prepared

LOSS = "loss"


class KeptModel(Feature):
    """The last weights; the best ones where the recipe says so or stops early."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `kept_model` and `early_stopping`."""
        training, patience, choices = draft.training, draft.recipe.early_stopping_patience, draft.choices
        metric, greater = best_metric(training, draft.prepared)
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
        draft.arguments |= settled

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Let the trainer stop early; a step that is only looked at evaluates nothing."""
        patience = plan.recipe.early_stopping_patience
        if patience is not None and trainer.args.metric_for_best_model is not None:
            from transformers import EarlyStoppingCallback

            trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=patience))


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
