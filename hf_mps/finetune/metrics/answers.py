"""SQuAD's formulas: exact match and token F1 of an answer against several truths, normalised as the benchmark does.

After the benchmark's evaluation scripts (https://rajpurkar.github.io/SQuAD-explorer/), which `evaluate` carries as
`squad` and `squad_v2`. Scores of one answer are 0 to 1; those of a data set are percentages, as everybody tells them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """`text` in small letters, without ASCII punctuation, the articles a, an, the, and surplus white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """1.0 where the normalised answer is one of the normalised truths; no truth at all stands for the empty answer."""
    return float(any(normalised(answer) == normalised(truth) for truth in truths or ("",)))


def f1(answer: str, truths: Sequence[str]) -> float:
    """The best F1 of the answer's words against a truth's, in [0, 1]; no truth at all stands for the empty answer.

    Where one side has no words left, 1.0 if the other has none either, as SQuAD 2.0 counts. SQuAD 1.1 calls that 0.0,
    which can only show where a truth is nothing but articles and punctuation.
    """
    return max(_overlap(normalised(answer).split(), normalised(truth).split()) for truth in truths or ("",))


def mean(scores: Iterable[float]) -> float:
    """The mean of scores between 0 and 1, in percent."""
    values = list(scores)
    return 100.0 * sum(values) / len(values)


def squad(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD 1.1: `exact_match` and `f1` in percent, over all questions."""
    pairs = list(zip(answers, references, strict=True))
    return {
        "exact_match": mean(exact_match(*pair) for pair in pairs),
        "f1": mean(f1(*pair) for pair in pairs),
    }


def squad_v2(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """SQuAD 2.0: `exact` and `f1` in percent over all questions; the same over those with an answer (HasAns_) and
    over those without (NoAns_), each only where there are such questions. A truth of no words counts as none.
    """
    told = [[truth for truth in truths if normalised(truth)] for truths in references]
    pairs = list(zip(answers, told, strict=True))
    found = {}
    for prefix, chosen in (
        ("", pairs),
        ("HasAns_", [pair for pair in pairs if pair[1]]),
        ("NoAns_", [pair for pair in pairs if not pair[1]]),
    ):
        if chosen:
            found[f"{prefix}exact"] = mean(exact_match(*pair) for pair in chosen)
            found[f"{prefix}f1"] = mean(f1(*pair) for pair in chosen)
    return found


def columns(
    predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """evaluate's rows, matched by `id`, as texts and their truths. Raises ValueError for an id that has no partner."""
    truths = {row["id"]: list(row["answers"]["text"]) for row in references}
    unknown = [row["id"] for row in predictions if row["id"] not in truths]
    if unknown or len(truths) != len(predictions):
        raise ValueError(f"predictions and references name other questions, first {(unknown or [*truths])[0]}")
    return [row["prediction_text"] for row in predictions], [truths[row["id"]] for row in predictions]


def info(description: str) -> Any:
    """The evaluate.MetricInfo of a metric over answers in evaluate's form of SQuAD."""
    import datasets
    import evaluate

    text, number = datasets.Value("string"), datasets.Value("int32")
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description='predictions: {"id", "prediction_text"}; references: {"id", "answers": {"text": [...]}}.',
        features=datasets.Features(
            {
                "predictions": {"id": text, "prediction_text": text},
                "references": {
                    "id": text,
                    "answers": {"text": datasets.List(text), "answer_start": datasets.List(number)},
                },
            }
        ),
    )


def _overlap(answer: list[str], truth: list[str]) -> float:
    if not answer or not truth:
        return float(answer == truth)
    shared = sum((Counter(answer) & Counter(truth)).values())
    return 2 * shared / (len(answer) + len(truth))
