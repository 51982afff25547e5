"""What hypothesis draws for tests of anybody's data, and how many cases a test has.

CI runs the same cases each time (derandomized), so that a failure is a change's and not chance's: a commit a quarter of
them, each night all. HYPOTHESIS_TIMES=20 draws twenty times as many, new ones in every run: for a look further once
readers change.
"""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests import share

TIMES = int(os.environ.get("HYPOTHESIS_TIMES", "1"))


def cases(count: int) -> settings:
    """`count` cases for a test where everything is looked at, TIMES as many where somebody asks for more."""
    return settings(
        max_examples=count * TIMES if share.is_whole() or TIMES > 1 else count // 4,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,  # nothing is left behind in the checkout
        suppress_health_check=list(HealthCheck),
    )


# Letters that readers stumble over, beside any other: separators, quotation marks, line ends of several systems.
AWKWARD = ",;\t\"'\n\r \ufeff\u2028\u0085\\#=é漢🎉ש"
texts = st.text(
    st.one_of(st.sampled_from(AWKWARD), st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=12
)
names = st.text(st.sampled_from("abcdeé漢_1"), min_size=1, max_size=4)
"""Of columns: no separator in them, which is what the separator of a csv is told by."""

# What befalls a file between two people: cut off, a byte hit, another encoding, empty.
DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("hit"), st.floats(0, 1), st.binary(min_size=1, max_size=2)),
    st.tuples(st.just("coded"), st.sampled_from(["utf-16", "utf-16-le", "latin-1", "utf-32"])),
    st.tuples(
        st.just("put"), st.floats(0, 1), st.sampled_from([b"\0", b'"', b"\xff", b"\r", b"\n\n", b",", b"\xef\xbb\xbf"])
    ),
)


def damaged(content: bytes, damage: tuple[Any, ...] | None) -> bytes:
    """`content` after what DAMAGE drew, places as shares of the length."""
    if damage is None:
        return content
    kind, *rest = damage
    if kind == "coded":
        return content.decode("utf-8", "replace").encode(rest[0], "replace")
    at = int(rest[0] * len(content))
    if kind == "cut":
        return content[:at]
    if kind == "hit":
        return content[:at] + rest[1] + content[at + len(rest[1]) :]
    return content[:at] + rest[1] + content[at:]


@dataclass(frozen=True)
class Table:
    """A table, and the bytes of a csv that holds it as `separator` and `header` say."""

    columns: list[str]
    rows: list[list[str]]
    separator: str
    header: bool
    content: bytes
    whole: bool
    """Whether every row has as many fields as there are columns, and nothing befell the file."""


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A table in a csv: any separator, quoting, line end, byte order mark; one in two with a fault."""
    header = draw(st.sampled_from([True, True, True, False]))
    columns = draw(st.lists(names, min_size=1 if header else 2, max_size=4, unique=True))
    width = len(columns)
    rows = draw(st.lists(st.lists(texts, min_size=width, max_size=width), min_size=1, max_size=5))
    separator = draw(st.sampled_from(",;\t")) if width > 1 else ","
    fault = draw(st.sampled_from([None, None, None, "longer", "shorter", "all longer", "names", "damage"]))
    written = [list(row) for row in rows]
    place = draw(st.integers(0, len(rows) - 1))
    if fault == "longer":
        written[place].append(draw(texts))
    elif fault == "shorter" and width > 1:
        written[place].pop()
    elif fault == "all longer":
        written = [[*row, "more"] for row in written]
    elif fault == "names":
        columns = [columns[0]] * width
    out = io.StringIO(newline="")
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    # Python's writer leaves a line end bare that is not its own, and without a header commas tell the separator.
    quoted = not header or any(letter in field for row in written for field in row for letter in "\r\n")
    quoting = csv.QUOTE_ALL if quoted or draw(st.booleans()) else csv.QUOTE_MINIMAL
    csv.writer(out, delimiter=separator, quoting=quoting, lineterminator=end).writerows(
        [columns, *written] if header else written
    )
    text = out.getvalue()
    if draw(st.booleans()):
        text = text.removesuffix(end)
    content = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig"])))
    damage = draw(DAMAGE) if fault == "damage" else None
    return Table(columns, rows, separator, header, damaged(content, damage), whole=fault is None)


numbers = st.one_of(
    st.integers(-5, 5), st.integers(-(2**66), 2**66), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
scalars = st.one_of(st.none(), texts, numbers, st.just("2020-01-01"), st.just("null"))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def alike(draw: st.DrawFn) -> list[Any]:
    """Rows whose columns have one kind each, as a table has them; gaps among them."""
    kinds = [texts, st.integers(-9, 9), st.floats(-1, 1), st.booleans(), st.lists(texts, max_size=2)]
    kinds += [st.fixed_dictionaries({"en": texts, "de": texts}), st.lists(st.dictionaries(names, texts, max_size=2))]
    columns = draw(st.dictionaries(names, st.sampled_from(kinds), min_size=1, max_size=3))
    row = {name: st.one_of(kind, kind, kind, st.none()) for name, kind in columns.items()}
    return draw(st.lists(st.fixed_dictionaries({}, optional=row), min_size=1, max_size=4))


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, bytes]:
    """The ending and the bytes of a file of JSON: a list, lines, one of both by the other's name, or damaged."""
    rows = draw(
        st.one_of(alike(), alike(), st.lists(st.dictionaries(names, values, max_size=3), max_size=4), st.just([]))
    )
    if draw(st.integers(0, 9)) == 0:
        rows = [*rows, draw(values)]
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 2]))
    lines = draw(st.booleans())
    ending = draw(st.sampled_from([".jsonl", ".jsonl", ".json"])) if lines else ".json"
    written = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    text = "\n".join(written) if lines else json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    content = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig"])))
    return ending, damaged(content, draw(DAMAGE) if draw(st.integers(0, 3)) == 0 else None)
