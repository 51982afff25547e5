"""Precision, recall and F1 of whole names in tagged words, as the CoNLL shared tasks count them.

The rules are those of the shared tasks' `conlleval` (https://www.clips.uantwerpen.be/conll2000/chunking/output.html),
which the package seqeval follows and `evaluate` carries as `seqeval`. The package is not used: its last release is of
2020 and comes as a source archive alone, whose build downloads setuptools_scm (https://pypi.org/project/seqeval). Sets
of spans are all that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

Rows = Sequence[Sequence[str]]
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


def spans(tags: Sequence[str], *, suffix: bool = False) -> set[Span]:
    """The names in one row of tags; with `suffix` the prefix stands behind the kind (`PER-B`).

    A name begins at B or S, after an E or S, after O, and where the kind changes; so an I with nothing before it begins
    one too. It ends before the next beginning, after an E or S, and at an O. Tags of other letters are taken as seqeval
    takes them: the first letter is the prefix, and only a change of kind begins or ends a name.
    """
    found: set[Span] = set()
    start, before, kind = 0, OUTSIDE, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, here = _parts(tag, suffix)
        if before in "ES" or (before in "BI" and prefix in "BSO") or (before not in "O." and here != kind):
            found.add((kind, start, place))
        if prefix in "BS" or (before in "ESO" and prefix in "EI") or (prefix not in "O." and here != kind):
            start = place
        before, kind = prefix, here
    return found


def seqeval(predictions: Rows, references: Rows) -> dict[str, Any]:
    """What `evaluate` reports as seqeval by default, 0.0 where there is nothing to divide by; as `report`."""
    return report(predictions, references, spans(one_row(predictions)), spans(one_row(references)))


def one_row(rows: Rows) -> list[str]:
    """All rows behind each other, with an O behind each so that no name spans two."""
    return [tag for row in rows for tag in (*row, OUTSIDE)]


def report(
    predictions: Rows, references: Rows, guessed: AbstractSet[Any], there: AbstractSet[Any], *, nothing: float = 0.0
) -> dict[str, Any]:
    """A dict for each kind of name, and `overall_` precision, recall, f1, accuracy, from the names found in both.

    Each kind's dict holds precision, recall and f1 in [0, 1] and `number`, the names in the references. The accuracy is
    of single words, O included. `nothing` is what there is where there is nothing to divide by. Raises ValueError where
    rows differ in length.
    """
    pairs = [pair for row in zip(predictions, references, strict=True) for pair in zip(*row, strict=True)]
    found: dict[str, Any] = {}
    for kind in sorted({span[0] for span in guessed | there}):
        ours, theirs = ({span for span in side if span[0] == kind} for side in (guessed, there))
        found[kind] = _scores(ours, theirs, nothing) | {"number": len(theirs)}
    found |= {f"overall_{name}": value for name, value in _scores(guessed, there, nothing).items()}
    found["overall_accuracy"] = sum(one == other for one, other in pairs) / len(pairs) if pairs else 0.0
    return found


def _parts(tag: str, suffix: bool) -> tuple[str, str]:
    """The prefix and the kind of a tag by seqeval's rules, which split `NOUN` into N and OUN."""
    if suffix:
        return tag[-1:], tag[:-1].rsplit("-", 1)[0] or "_"
    return tag[:1], tag[1:].split("-", 1)[-1] or "_"


def _scores(guessed: AbstractSet[Any], there: AbstractSet[Any], nothing: float) -> dict[str, float]:
    right = len(guessed & there)
    precision = right / len(guessed) if guessed else nothing
    recall = right / len(there) if there else nothing
    both = precision + recall
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / both if both else 0.0}
