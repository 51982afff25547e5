"""Precision, recall and F1 of whole names in tagged words, as the CoNLL shared tasks count them.

The rules are those of the shared tasks' `conlleval` (https://www.clips.uantwerpen.be/conll2000/chunking/output.html),
which the package seqeval follows and `evaluate` carries as `seqeval`. The package is not used: its last release is of
2020 and comes as a source archive alone, whose build downloads setuptools_scm (https://pypi.org/project/seqeval). Sets
of spans are all that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Span = tuple[str, int, int]
"""A name's kind, its first word and the word after its last."""
OUTSIDE = "O"
OVERALL = ("precision", "recall", "f1")


def split(tag: str) -> tuple[str, str]:
    """The prefix and the kind of a tag: `B-PER` gives ("B", "PER"), a bare `B` ("B", "_"), `O` ("O", "_")."""
    prefix, _, kind = tag.partition("-")
    return prefix, kind or "_"


def is_chunked(tags: Iterable[str]) -> bool:
    """Whether tags mark where names begin and end: `O` and prefixes of IOB1, IOB2 or IOBES before a dash, no others."""
    named = {tag for tag in tags if tag != OUTSIDE}
    return bool(named) and all(tag[:2] in ("B-", "I-", "E-", "S-") and len(tag) > 2 for tag in named)


def kinds(tags: Iterable[str]) -> list[str]:
    """The kinds of names that tags speak of, sorted."""
    return sorted({split(tag)[1] for tag in tags if tag != OUTSIDE})


def spans(tags: Sequence[str]) -> set[Span]:
    """The names in one row of tags.

    A name begins at B or S, after an E or S, after O, and where the kind changes; so an I with nothing before it begins
    one too. It ends before the next beginning, after an E or S, and at an O.
    """
    found: set[Span] = set()
    start, before, kind = 0, OUTSIDE, "_"
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, here = split(tag)
        broken = prefix in ("B", "S", OUTSIDE) or before in ("E", "S", OUTSIDE) or here != kind
        if before != OUTSIDE and broken:
            found.add((kind, start, place))
        if prefix != OUTSIDE and broken:
            start = place
        before, kind = prefix, here
    return found


def seqeval(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What `evaluate` reports as seqeval: a dict for each kind of name, and `overall_` precision, recall, f1, accuracy.

    Each kind's dict holds precision, recall and f1 in [0, 1] and `number`, the names in the references. The accuracy is
    of single words, O included. 0.0 where there is nothing to divide by. Raises ValueError where rows differ in length.
    """
    guessed = _numbered(predictions)
    there = _numbered(references)
    pairs = [pair for row in zip(predictions, references, strict=True) for pair in zip(*row, strict=True)]
    report: dict[str, Any] = {}
    for kind in sorted({span[0] for _, span in guessed | there}):
        ours, theirs = ({each for each in side if each[1][0] == kind} for side in (guessed, there))
        report[kind] = _scores(ours, theirs) | {"number": len(theirs)}
    report |= {f"overall_{name}": value for name, value in _scores(guessed, there).items()}
    report["overall_accuracy"] = sum(one == other for one, other in pairs) / len(pairs) if pairs else 0.0
    return report


def info(description: str) -> Any:
    """The evaluate.MetricInfo of a metric over a list of tags a row."""
    import datasets
    import evaluate

    column = datasets.Sequence(datasets.Value("string", id="label"), id="sequence")
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description="predictions, references: a list of tags for each row, as long as each other.",
        features=datasets.Features({"predictions": column, "references": column}),
    )


def _numbered(rows: Sequence[Sequence[str]]) -> set[tuple[int, Span]]:
    return {(number, span) for number, row in enumerate(rows) for span in spans(row)}


def _scores(guessed: set[tuple[int, Span]], there: set[tuple[int, Span]]) -> dict[str, float]:
    right = len(guessed & there)
    return {
        "precision": right / len(guessed) if guessed else 0.0,
        "recall": right / len(there) if there else 0.0,
        "f1": 2 * right / (len(guessed) + len(there)) if right else 0.0,
    }
