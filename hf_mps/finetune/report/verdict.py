"""The verdict on a run: one line where its numbers show that it has learnt nothing, with what to try."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_mps.core.errors import brief
from hf_mps.finetune.report.results import RunRecord

LONGER = "next: more training.num_train_epochs, another training.learning_rate, or more rows"


def only_answer(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the only answer in `rows` of predictions.csv; None where answers differ, or where all truths are equal."""

    def distinct(*names: str) -> set[str]:
        return {str(row[name]) for row in rows for name in names if name in row}

    answers, truths = distinct("prediction", "generated"), distinct("label", "truth", "reference")
    return answers.pop() if len(rows) > 1 and len(answers) == 1 and len(truths) != 1 else None


def doubt(record: RunRecord, answer: str | None = None) -> str | None:
    """Return why a run seems to have learnt nothing, or lost what it had learnt, and what to try; None if all is well.

    `answer` is that of `only_answer`. A smoke run, whose scores do not count, raises no doubt.
    """
    if "smoke" in record.choices:
        return None
    name, greater = record.main_metric, record.greater_is_better
    rewards = _finite(entry.get("reward") for entry in record.log_history)
    if rewards and not any(rewards):
        return "every reward was 0; next: easier prompts, a larger model, or a reward that some answers get"
    if answer is not None:
        shown = repr(brief(answer)) if answer else "nothing"
        return f"all rows have one answer, {shown}: the model has learnt nothing; {LONGER}"
    came, base = record.metrics.get(name), record.baseline.metrics.get(name) if record.baseline else None
    if came is None or not math.isfinite(came):
        return None

    def above(one: float, other: float) -> bool:
        one, other = round(one, 4), round(other, 4)  # as they are shown: equal does not read as better
        return one > other if greater else one < other

    if base is not None and not above(came, base):
        what = record.baseline.what if record.baseline else ""
        return f"{name} {came:.4f} is no better than the baseline ({base:.4f}), which {what}; {LONGER}"
    steps = [entry for entry in record.log_history if _finite([entry.get(f"eval_{name}")])]
    best = (max if greater else min)(steps, key=lambda entry: entry[f"eval_{name}"], default=None)
    if best is None or not above(best[f"eval_{name}"], came):
        return None
    earlier = f"{best[f'eval_{name}']:.4f} at step {best['step']}"
    return f"{name} was better before: {earlier}; next: training.load_best_model_at_end=true, or fewer epochs"


def closing_line(record: RunRecord) -> str | None:
    """Return the run's doubt, or that it beats its baseline; None where there is nothing to compare."""
    base, name = record.baseline.metrics if record.baseline else {}, record.main_metric
    compared = name in base and math.isfinite(record.metrics.get(name, math.nan)) and "smoke" not in record.choices
    return record.doubt or (f"{name} is better than the baseline's" if compared else None)


def _finite(values: Iterable[Any]) -> list[float]:
    return [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
