"""Names in tagged words with seqeval's keywords; `mode="strict"` reads tags by a scheme and drops what breaks it.

A scheme is its prefixes and the pairs of neighbouring tags at which a name begins, goes on and ends, after
https://github.com/chakki-works/seqeval/blob/master/seqeval/scheme.py (1.2.2). A pair is the prefix before, the prefix
here (`.` is any), and whether the kinds are the same (=), differ (!) or do not matter (*).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.finetune.metrics import tags
from hf_mps.finetune.metrics.tags import OUTSIDE, Rows, Span


@dataclass(frozen=True)
class Scheme:
    """Which prefixes there are, and the pairs at which a name begins, goes on and ends."""

    prefixes: str
    begins: str
    goes_on: str
    ends: str


SCHEMES = {
    "IOB1": Scheme("IOB", "OI* II! BI* IB= BB=", "BI= II=", "II! IO* IB* BO* BI! BB="),
    "IOB2": Scheme("IOB", ".B*", "BI= II=", "IO* II! IB* BO* BI! BB*"),
    "IOE1": Scheme("IOE", "OI* II! EI* EE=", "II= IE=", "II! IO* IE! EI= EE="),
    "IOE2": Scheme("IOE", "OI* OE* EI* EE* II! IE!", "IE= II=", "E.*"),
    "IOBES": Scheme("IOBES", ".B* .S*", "BI= BE= II= IE=", "S.* E.*"),
    "BILOU": Scheme("BILOU", ".B* .U*", "BI= BL= II= IL=", "U.* L.*"),
}


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

    mode="strict" reads the tags by `scheme`, or by the one that the references' prefixes speak of; otherwise the rules
    of conlleval hold. `suffix`: the prefix stands behind the kind. `zero_division` is 0, 1 or "warn": 0 and a warning.
    `sample_weight` changes none of these figures, as in seqeval. Raises ValueError for a scheme that there is not and
    for a tag that its scheme has not.
    """
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"seqeval has no scheme {scheme}; allowed: {', '.join(SCHEMES)}")
    guessed: set[Any]
    there: set[Any]
    if mode == "strict":
        read = SCHEMES[scheme or _scheme_of(references, suffix)]
        guessed, there = (
            {(*span, number) for number, row in enumerate(rows) for span in strict_spans(row, read, suffix=suffix)}
            for rows in (predictions, references)
        )
    else:
        guessed, there = (tags.spans(tags.one_row(rows), suffix=suffix) for rows in (predictions, references))
    kinds = [{span[0] for span in side} for side in (guessed, there)]
    if zero_division == "warn" and (kinds[0] != kinds[1] or not kinds[0]):
        _warn_undefined()
    return tags.report(predictions, references, guessed, there, nothing=0.0 if zero_division in ("warn", 0) else 1.0)


def strict_spans(row: Sequence[str], scheme: Scheme, *, suffix: bool = False) -> set[Span]:
    """The names in one row that begin, go on and end by the scheme. Raises ValueError for a prefix that it has not."""
    words = [_parts(tag, suffix) for tag in (*row, OUTSIDE)]
    found: set[Span] = set()
    place, before = 0, (OUTSIDE, "_")
    while place < len(words):
        prefix, kind = words[place]
        if prefix not in scheme.prefixes:
            raise ValueError(f"seqeval: {row[place]} is no tag of this scheme, whose prefixes are {scheme.prefixes}")
        start = place
        place += 1
        if _at(before, words[start], scheme.begins):
            while _at(words[place - 1], words[place], scheme.goes_on):
                place += 1
            if _at(words[place - 1], words[place], scheme.ends):
                found.add((kind, start, place))
        before = words[place - 1]
    return found


def _at(before: tuple[str, str], here: tuple[str, str], pairs: str) -> bool:
    same = "=" if before[1] == here[1] else "!"
    return any(
        pair[0] in (".", before[0]) and pair[1] in (".", here[0]) and pair[2] in ("*", same) for pair in pairs.split()
    )


def _parts(tag: str, suffix: bool) -> tuple[str, str]:
    prefix, kind = (tag[-1:], tag[:-1]) if suffix else (tag[:1], tag[1:])
    return prefix, kind.strip("-") or "_"


def _scheme_of(rows: Rows, suffix: bool) -> str:
    """The scheme that the prefixes of the tags speak of. Raises ValueError where it is none or could be several."""
    prefixes = {_parts(tag, suffix)[0] for row in rows for tag in row}
    for scheme, needed, alone in (("IOB2", "B", None), ("IOE2", "E", None), ("IOBES", "BE", "S"), ("BILOU", "BL", "U")):
        if prefixes == {alone} or (prefixes >= set(needed) and prefixes <= set(SCHEMES[scheme].prefixes)):
            return scheme
    raise ValueError(f"seqeval: no scheme has the prefixes {', '.join(sorted(prefixes))}; give scheme= as well")


def _warn_undefined() -> None:
    from sklearn.exceptions import UndefinedMetricWarning

    warnings.warn(
        "seqeval: some kinds of names are never predicted or not there, their precision or recall is set to 0.0; "
        "zero_division=0 or 1 says what it shall be",
        UndefinedMetricWarning,
        stacklevel=3,
    )
