"""The metric range that a recipe promises, and whether a run kept it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hf_mps.choice import Choice
from hf_mps.errors import UserError, nearest
from hf_mps.finetune.order import Order
from hf_mps.finetune.report import Expectation

# What the command line may change without making another run of it than the one that the promise was given for.
HARMLESS = (
    "seed",
    "output_dir",
    "expect",
    "training.logging_",
    "training.report_to",
    "training.run_name",
    "training.save_strategy",
    "training.save_steps",
    "training.save_total_limit",
    "training.dataloader_",
)


def applies(order: Order) -> Choice[bool]:
    """Whether the recipe's promise holds for this run: not for one whose model, data or training was changed."""
    changed = [key for key in order.changed if not key.startswith(HARMLESS)]
    stated = any(key.partition(".")[0] == "expect" for key in order.changed)
    if not order.recipe.expect:
        return Choice(False, "the recipe promises nothing")
    if changed and not stated:
        return Choice(False, f"not checked: it is for the recipe as written, and this run changes {', '.join(changed)}")
    return Choice(True, "given with this run" if stated else "the recipe's own")


def in_words(order: Order) -> str:
    """The ranges as one phrase: `f1 0.85 to 1`, `accuracy at least 0.7`."""
    parts = []
    for metric in order.recipe.expect:
        low, high = _bounds(order, metric)
        parts.append(f"{metric} {low:g} to {high:g}" if high is not None else f"{metric} at least {low:g}")
    return ", ".join(parts)


def refuse_unmeasured(order: Order, measured: Collection[str]) -> None:
    """Raise UserError for a metric in `expect` that the run does not measure."""
    for metric in order.recipe.expect if applies(order).value else ():
        if metric not in measured:
            raise UserError(
                f"expect.{metric} is not measured; allowed: {', '.join(measured)}{nearest(metric, measured)}"
            )


def judge(order: Order, metrics: Mapping[str, float]) -> Expectation | None:
    """The promise that was missed, or else the first one; None where none applies."""
    if not applies(order).value:
        return None
    outcomes = []
    for metric in order.recipe.expect:
        low, high = _bounds(order, metric)
        kept = metrics[metric] >= low and (high is None or metrics[metric] <= high)
        outcomes.append(Expectation(metric, low, high, kept))
    return next((outcome for outcome in outcomes if not outcome.met), outcomes[0])


def _bounds(order: Order, metric: str) -> tuple[float, float | None]:
    bounds = order.recipe.expect[metric]
    return (bounds[0], bounds[1]) if isinstance(bounds, list) else (bounds, None)
