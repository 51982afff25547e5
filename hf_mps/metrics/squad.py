"""SQuAD's formulas: exact match and token F1 of an answer against several truths, normalised as the benchmark does.

After the benchmark's evaluation scripts (https://rajpurkar.github.io/SQuAD-explorer/), which `evaluate` carries as
`squad` and `squad_v2`. Scores of one answer are 0 to 1, those of a data set percentages, as is usual.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return `text` in lower case, without ASCII punctuation, the articles a, an, the, and surplus white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """Return 1.0 where the normalised answer is one of the normalised truths; no truth means the empty answer."""
    return float(any(normalised(answer) == normalised(truth) for truth in truths or ("",)))


def f1(answer: str, truths: Sequence[str], *, of_nothing: float = 1.0) -> float:
    """Return the best F1 of the answer's words against a truth's, in [0, 1]; no truth means the empty answer.

    Where neither side has a word left it is `of_nothing`: 1.0 in SQuAD 2.0, 0.0 in SQuAD 1.1.
    """
    return max(_overlap(normalised(answer).split(), normalised(truth).split(), of_nothing) for truth in truths or ("",))


def mean(scores: Iterable[float]) -> float:
    """Return the mean of scores between 0 and 1, in percent."""
    values = list(scores)
    return 100.0 * sum(values) / len(values)


def squad(predictions: Rows, references: Rows) -> dict[str, float]:
    """SQuAD 1.1 from evaluate's rows: `exact_match` and `f1` in percent; a question without a prediction scores 0.

    predictions: `id`, `prediction_text`; references: `id`, `answers` with a list `text`.
    """
    given = {row["id"]: row["prediction_text"] for row in predictions}
    _tell_missing(references, given, "scores 0")
    pairs = [(given.get(row["id"]), list(row["answers"]["text"])) for row in references]
    return {
        "exact_match": mean(0.0 if answer is None else exact_match(answer, truths) for answer, truths in pairs),
        "f1": mean(0.0 if answer is None else f1(answer, truths, of_nothing=0.0) for answer, truths in pairs),
    }


def squad_v2(predictions: Rows, references: Rows, no_answer_threshold: float = 1.0) -> dict[str, float]:
    """SQuAD 2.0 from evaluate's rows: `exact` and `f1` in percent with their `total`, over all questions; the same over
    those that have an answer (HasAns_) and over those that have none (NoAns_), each only where there are such
    questions. A question without a prediction is left out.

    predictions: `id`, `prediction_text`, `no_answer_probability` (0 to 1); references as `squad` takes them. An answer
    with a probability above the threshold counts as none. `best_exact` and `best_f1` are the scores under the best
    threshold, given as `best_exact_thresh` and `best_f1_thresh`.
    """
    given = {row["id"]: row for row in predictions}
    _tell_missing(references, given, "is left out")
    asked = [row for row in references if row["id"] in given]
    answers = [given[row["id"]]["prediction_text"] for row in asked]
    doubted = [float(given[row["id"]].get("no_answer_probability") or 0.0) for row in asked]
    has_answer = [len(row["answers"]["text"]) > 0 for row in asked]
    # A truth of no words counts as none for the scores, but not for the question: as in the benchmark's script.
    stated = [[truth for truth in row["answers"]["text"] if normalised(truth)] for row in asked]
    pairs = list(zip(answers, stated, strict=True))
    raw = {"exact": [exact_match(*pair) for pair in pairs], "f1": [f1(*pair) for pair in pairs]}
    thresholded = {
        name: [
            float(not answerable) if doubt > no_answer_threshold else score
            for score, doubt, answerable in zip(scores, doubted, has_answer, strict=True)
        ]
        for name, scores in raw.items()
    }
    figures: dict[str, float] = {}
    for prefix, kinds in (("", (True, False)), ("HasAns_", (True,)), ("NoAns_", (False,))):
        chosen = [row for row, answerable in enumerate(has_answer) if answerable in kinds]
        if chosen:
            figures |= {f"{prefix}{name}": mean(scores[row] for row in chosen) for name, scores in thresholded.items()}
            figures[f"{prefix}total"] = len(chosen)
    for name, scores in raw.items():
        figures[f"best_{name}"], figures[f"best_{name}_thresh"] = _best(answers, scores, doubted, has_answer)
    return figures


def _best(
    answers: Sequence[str], scores: Sequence[float], doubts: Sequence[float], has_answer: Sequence[bool]
) -> tuple[float, float]:
    """Return the best score in percent over all thresholds, and that threshold.

    Starts with every question unanswered and adds the answers, the least doubted first.
    """
    total = best = float(has_answer.count(False))
    threshold = 0.0
    for row in sorted(range(len(scores)), key=lambda row: doubts[row]):
        total += scores[row] if has_answer[row] else -float(bool(answers[row]))
        if total > best:
            best, threshold = total, doubts[row]
    return 100.0 * best / len(scores), threshold


def _overlap(answer: list[str], truth: list[str], of_nothing: float) -> float:
    if not answer or not truth:
        return of_nothing if answer == truth else 0.0
    return 2 * sum((Counter(answer) & Counter(truth)).values()) / (len(answer) + len(truth))


def _tell_missing(references: Rows, given: Mapping[Any, Any], consequence: str) -> None:
    missing = [row["id"] for row in references if row["id"] not in given]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        print(f"hf-mps: no prediction for question {missing[0]}{more}, which {consequence}", file=sys.stderr)
