"""SQuAD's scores from evaluate's rows, matched by their `id`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.finetune.metrics import answers

Rows = Sequence[Mapping[str, Any]]


def squad(predictions: Rows, references: Rows) -> dict[str, float]:
    """SQuAD 1.1: `exact_match` and `f1` in percent, over all questions; one without a prediction scores 0.

    predictions: `id`, `prediction_text`; references: `id`, `answers` with a list `text`.
    """
    given = {row["id"]: row["prediction_text"] for row in predictions}
    _tell_missing(references, given, "scores 0")
    texts = [given.get(row["id"]) for row in references]
    return answers.squad(texts, [list(row["answers"]["text"]) for row in references])


def squad_v2(predictions: Rows, references: Rows, no_answer_threshold: float = 1.0) -> dict[str, float]:
    """SQuAD 2.0: `exact`, `f1` (percent) and `total`, of all questions, of those with and of those without an answer.

    predictions: `id`, `prediction_text`, `no_answer_probability` (0 to 1); references as `squad`'s. An answer with a
    probability above the threshold counts as none. `best_exact`, `best_f1`: under the best threshold, their `_thresh`.
    """
    given = {row["id"]: row for row in predictions}
    _tell_missing(references, given, "is left out")
    asked = [row for row in references if row["id"] in given]
    rows = [given[row["id"]] for row in asked]
    return answers.squad_v2(
        [row["prediction_text"] for row in rows],
        [list(row["answers"]["text"]) for row in asked],
        [float(row.get("no_answer_probability") or 0.0) for row in rows],
        no_answer_threshold,
    )


def _tell_missing(references: Rows, given: Mapping[Any, Any], consequence: str) -> None:
    missing = [row["id"] for row in references if row["id"] not in given]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        print(f"hf-mps: no prediction for question {missing[0]}{more}, which {consequence}", file=sys.stderr)
