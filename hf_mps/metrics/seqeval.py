"""Precision, recall and F1 of whole names in tagged words, as the CoNLL shared tasks count them.

The rules are those of the shared tasks' `conlleval` (https://www.clips.uantwerpen.be/conll2000/chunking/output.html),
which the package seqeval follows and `evaluate` carries as `seqeval`. The package is not used: its last release is of
2020 and comes as a source archive alone, whose build downloads setuptools_scm (https://pypi.org/project/seqeval). Sets
of spans are all that it takes.

`mode="strict"`, which reads tags by a scheme and drops what breaks it, is the package's alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

Rows = Sequence[Sequence[str]]
Span = tuple[str, int, int]
"""A name's kind, its first word and the word after its last."""
OUTSIDE = "O"
OVERALL = ("precision", "recall", "f1")


def split(tag: str) -> tuple[str, str]:
    """Return the prefix and the kind of a tag: `B-PER` gives ("B", "PER"), a bare `B` ("B", "_"), `O` ("O", "_")."""
    prefix, _, kind = tag.partition("-")
    return prefix, kind or "_"


def is_chunked(tags: Iterable[str]) -> bool:
    """Whether tags mark where names begin and end: only `O` and letters of IOB1, IOB2, IOBES or BILOU before a dash."""
    named = {tag for tag in tags if tag != OUTSIDE}
    return bool(named) and all(iobes(tag)[:2] in ("B-", "I-", "E-", "S-") and len(tag) > 2 for tag in named)


def iobes(tag: str) -> str:
    """Return a tag of BILOU as IOBES has it, whose letters `spans` reads: `L-PER` as `E-PER` and `U-PER` as `S-PER`."""
    return {"L-": "E-", "U-": "S-"}.get(tag[:2], tag[:2]) + tag[2:]


def kinds(tags: Iterable[str]) -> list[str]:
    """Return the kinds of names in tags, sorted."""
    return sorted({split(tag)[1] for tag in tags if tag != OUTSIDE})


def spans(tags: Sequence[str], *, suffix: bool = False) -> set[Span]:
    """Return the names in one row of tags; with `suffix` the prefix follows the kind (`PER-B`).

    A name begins at B or S, after an E or S, after O, and where the kind changes; so an I with nothing before it begins
    one too. It ends before the next beginning, after an E or S, and at an O. Tags with other letters are read as
    seqeval reads them: the first letter is the prefix, and only a change of kind begins or ends a name.
    """
    names: set[Span] = set()
    start, before, kind = 0, OUTSIDE, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        # By seqeval's rules, which split `NOUN` into N and OUN.
        prefix, here = (tag[-1:], tag[:-1].rsplit("-", 1)[0]) if suffix else (tag[:1], tag[1:].split("-", 1)[-1])
        here = here or "_"
        if before in "ES" or (before in "BI" and prefix in "BSO") or (before not in "O." and here != kind):
            names.add((kind, start, index))
        if prefix in "BS" or (before in "ESO" and prefix in "EI") or (prefix not in "O." and here != kind):
            start = index
        before, kind = prefix, here
    return names


def one_row(rows: Rows) -> list[str]:
    """Return all rows as one, with an O after each so that no name spans two."""
    return [tag for row in rows for tag in (*row, OUTSIDE)]


def report(
    predictions: Rows, references: Rows, guessed: AbstractSet[Any], truths: AbstractSet[Any], *, nothing: float = 0.0
) -> dict[str, Any]:
    """Return a dict for each kind of name, and `overall_` precision, recall, f1, accuracy, from the names on both
    sides.

    Each kind's dict holds precision, recall and f1 in [0, 1] and `number`, the names in the references. The accuracy is
    of single words, O included. `nothing` replaces a figure whose divisor is 0. Raises ValueError where rows differ in
    length.
    """
    pairs = [pair for row in zip(predictions, references, strict=True) for pair in zip(*row, strict=True)]
    figures: dict[str, Any] = {}
    for kind in sorted({span[0] for span in guessed | truths}):
        ours, theirs = ({span for span in side if span[0] == kind} for side in (guessed, truths))
        figures[kind] = _scores(ours, theirs, nothing) | {"number": len(theirs)}
    figures |= {f"overall_{name}": value for name, value in _scores(guessed, truths, nothing).items()}
    figures["overall_accuracy"] = sum(answer == truth for answer, truth in pairs) / len(pairs) if pairs else 0.0
    return figures


def _scores(guessed: AbstractSet[Any], truths: AbstractSet[Any], nothing: float) -> dict[str, float]:
    correct = len(guessed & truths)
    precision = correct / len(guessed) if guessed else nothing
    recall = correct / len(truths) if truths else nothing
    both = precision + recall
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / both if both else 0.0}


def seqeval(
    predictions: Rows,
    references: Rows,
    suffix: bool = False,
    scheme: str | None = None,
    mode: str | None = None,
    sample_weight: Sequence[float] | None = None,
    zero_division: Any = "warn",
) -> dict[str, Any]:
    """Precision, recall, F1 and number of each kind of name, and `overall_` precision, recall, f1, accuracy.

    The rules are conlleval's, which take no `scheme`; mode="strict", which does, raises ValueError. `suffix`: the
    prefix comes after the kind. `zero_division` is 0, 1 or "warn": 0 and a warning. `sample_weight` changes none of
    these figures.
    """
    if mode == "strict":
        way_on = "seqeval.metrics.classification_report(references, predictions, mode='strict', …)"
        raise ValueError(f"seqeval's mode='strict' is the package's alone; next: pip install seqeval, and {way_on}")
    guessed, truths = (spans(one_row(rows), suffix=suffix) for rows in (predictions, references))
    kinds = [{span[0] for span in side} for side in (guessed, truths)]
    if zero_division == "warn" and (kinds[0] != kinds[1] or not kinds[0]):
        from sklearn.exceptions import UndefinedMetricWarning

        problem = "some kinds of names are never predicted or not there, their precision or recall is set to 0.0"
        way_on = "zero_division=0 or 1 says what it shall be"
        warnings.warn(f"seqeval: {problem}; {way_on}", UndefinedMetricWarning, stacklevel=2)
    return report(predictions, references, guessed, truths, nothing=0.0 if zero_division in ("warn", 0) else 1.0)
