"""The metric ranges that a recipe promises, and whether a run kept them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hf_mps.core.choice import Choice
from hf_mps.core.errors import nearest
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.tasks import Prepared
from hf_mps.metrics import seqeval
from hf_mps.metrics.table import REPORTS

LOSS = "loss"
# What the command line may change without making another run of it than the one that the promise was given for.
OF_TRAINING = ("logging_", "report_to", "run_name", "save_strategy", "save_steps", "save_total_limit", "dataloader_")
HARMLESS = ("seed", "output_dir", "expect", *(f"training.{name}" for name in OF_TRAINING))


@dataclass(frozen=True)
class Expectation:
    """The range that the recipe promised for one metric, and whether the run kept it. Either bound may be None."""

    metric: str
    low: float | None
    high: float | None
    met: bool

    def __str__(self) -> str:
        bounds = [f"at least {self.low:g}"] if self.low is not None else []
        bounds += [f"at most {self.high:g}"] if self.high is not None else []
        return f"{self.metric} {' and '.join(bounds)}: {'met' if self.met else 'missed'}"


def applies(recipe: Recipe, changed: Sequence[str]) -> Choice[bool]:
    """Return whether the promise holds for a run with these keys `changed`; it does not for another model, data or
    training.
    """
    others = [key for key in changed if not key.startswith(HARMLESS)]
    stated = any(key.partition(".")[0] == "expect" for key in changed)
    if not recipe.expect:
        return Choice(False, "the recipe promises nothing")
    if others and not stated:
        return Choice(False, f"not checked: it is for the recipe as written, and this run changes {', '.join(others)}")
    return Choice(True, "given with this run" if stated else "the recipe's own")


def ranges(recipe: Recipe) -> str:
    """Return the recipe's promises as one phrase: `f1 0.85 to 1`, `accuracy at least 0.7`."""
    parts = []
    for metric in recipe.expect:
        low, high = _bounds(recipe, metric)
        parts.append(f"{metric} {low:g} to {high:g}" if high is not None else f"{metric} at least {low:g}")
    return ", ".join(parts)


def unmeasured(recipe: Recipe, changed: Sequence[str] = (), prepared: Prepared | None = None) -> dict[str, str]:
    """Return a sentence for each key that names a metric which the run does not measure, by that key.

    These are `expect` and `training.metric_for_best_model`. Before the rows are read (no `prepared`) every known metric
    passes where the rows decide which there are.
    """
    best = recipe.training.get("metric_for_best_model")
    found: dict[str, str] = {}
    for metric in recipe.expect if applies(recipe, changed).value else ():
        if instead := _instead(metric, recipe, prepared.reported if prepared is not None else None):
            found.setdefault("expect", f"expect.{metric} is not measured; {instead}")
    if best is not None:
        name, during = str(best).removeprefix("eval_"), prepared.metrics.reported if prepared is not None else None
        if instead := _instead(name, recipe, during, LOSS):
            further = prepared.further if prepared is not None else ()
            split = next((split for split in further if name.startswith(f"{split}_")), None)
            once = f"; {split} is measured once, after the training" if split is not None else ""
            found["training.metric_for_best_model"] = f"training.metric_for_best_model is '{best}'; {instead}{once}"
    return found


def _instead(name: str, recipe: Recipe, measured: Collection[str] | None, *more: str) -> str:
    """Return what is allowed instead of a metric that is not `measured` (None: the rows decide); empty where it is."""
    names = recipe.metrics or tasks.find(recipe.task).metrics
    sure = measured is not None or names is not None  # else the rows decide which of all metrics there are
    known = [number for one in names or REPORTS for number in REPORTS[one]] if measured is None else measured
    allowed = list(dict.fromkeys((*known, *more)))
    if name in allowed or (measured is None and _may_be(name, known, recipe)):
        return ""
    words = f"allowed: {', '.join(allowed)}" if sure else f"{recipe.task} does not report it"
    return f"{words}{nearest(name, allowed)}"


def _may_be(name: str, known: Collection[str], recipe: Recipe) -> bool:
    """Return whether `name` is one of the metrics, that of a further split, or of one kind of name (PER_f1)."""
    splits = {**(recipe.data.files or {}), **(recipe.data.splits or {})}
    bare = next((name.removeprefix(f"{split}_") for split in splits if name.startswith(f"{split}_")), name)
    return bare in known or (bare.endswith(seqeval.OVERALL) and any(one.startswith("overall_") for one in known))


def judge(recipe: Recipe, changed: Sequence[str], metrics: Mapping[str, float]) -> Expectation | None:
    """Return the promise that was missed, or else the first one; None where none applies."""
    if not applies(recipe, changed).value:
        return None
    outcomes = []
    for metric in recipe.expect:
        low, high = _bounds(recipe, metric)
        kept = metrics[metric] >= low and (high is None or metrics[metric] <= high)
        outcomes.append(Expectation(metric, low, high, kept))
    return next((outcome for outcome in outcomes if not outcome.met), outcomes[0])


def _bounds(recipe: Recipe, metric: str) -> tuple[float, float | None]:
    bounds = recipe.expect[metric]
    return (bounds[0], bounds[1]) if isinstance(bounds, list) else (bounds, None)
