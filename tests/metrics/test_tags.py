"""Names in tagged words, counted as seqeval 1.2.2 counts them; its figures were taken once and stand here."""

from __future__ import annotations

import random

import pytest

from hf_mps.metrics import seqeval
from hf_mps.metrics.selection import of_tags


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ("B-PER I-PER O B-LOC", {("PER", 0, 2), ("LOC", 3, 4)}),
        ("B-PER B-PER", {("PER", 0, 1), ("PER", 1, 2)}),
        ("I-PER I-PER", {("PER", 0, 2)}),  # an I with nothing before it begins a name
        ("B-PER I-LOC", {("PER", 0, 1), ("LOC", 1, 2)}),  # so does one of another kind
        ("S-PER B-LOC E-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3), ("LOC", 3, 4)}),
        ("B-WORK-OF-ART I-WORK-OF-ART", {("WORK-OF-ART", 0, 2)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_spans_follow_conlleval(row: str, names: set[seqeval.Span]) -> None:
    assert seqeval.spans(row.split()) == names


def test_the_scores_are_seqevals() -> None:
    words = ["O", "O", "B-PER", "B-LOC", "I-PER", "I-LOC"]
    draw = random.Random(5)
    predictions = [[draw.choice(words) for _ in range(8)] for _ in range(40)]
    references = [[draw.choice(words) for _ in range(8)] for _ in range(40)]
    # seqeval.metrics.classification_report and accuracy_score of these rows, version 1.2.2.
    assert seqeval.seqeval(predictions, references, zero_division=0) == {
        "LOC": {
            "precision": pytest.approx(0.22727272727272727),
            "recall": pytest.approx(0.20408163265306123),
            "f1": pytest.approx(0.2150537634408602),
            "number": 98,
        },
        "PER": {
            "precision": pytest.approx(0.19791666666666666),
            "recall": pytest.approx(0.19791666666666666),
            "f1": pytest.approx(0.19791666666666666),
            "number": 96,
        },
        "overall_precision": pytest.approx(0.21195652173913043),
        "overall_recall": pytest.approx(0.20103092783505155),
        "overall_f1": pytest.approx(0.20634920634920634),
        "overall_accuracy": pytest.approx(0.240625),
    }


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        seqeval.seqeval([["O"]], [["O", "O"]], zero_division=0)


def test_names_of_bilou_are_counted_as_those_of_iobes() -> None:
    predictions = [["U-LOC", "U-LOC", "B-PER", "L-PER"], ["B-PER", "I-PER", "L-PER", "O"]]
    references = [["U-LOC", "U-LOC", "B-PER", "L-PER"], ["B-PER", "L-PER", "U-PER", "O"]]
    names = ["O", *(f"{letter}-{kind}" for letter in "BILU" for kind in ("LOC", "PER"))]
    figures = of_tags(None, names, "token-classification").compute(predictions, references)
    # Four names are answered and five are there; three are right: seqeval's mode="strict" with its scheme BILOU.
    assert [figures[f"overall_{number}"] for number in ("precision", "recall")] == [3 / 4, 3 / 5]


@pytest.mark.parametrize(
    ("named", "chunked"),
    [
        (("O", "B-PER", "I-PER"), True),
        (("O", "S-PER", "E-PER"), True),
        (("O", "B-PER", "L-PER", "U-LOC"), True),
        (("NOUN", "VERB", "O"), False),
        (("O",), False),
        (("B-", "O"), False),
    ],
)
def test_tags_that_mark_names_are_told_from_others(named: tuple[str, ...], chunked: bool) -> None:
    assert seqeval.is_chunked(named) is chunked
