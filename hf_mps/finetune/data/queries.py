"""Queries with documents and how relevant each is: a list a row, a pair a row, or a right and a wrong one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.text import tokens


@dataclass(frozen=True)
class Query:
    """A row: its `text`, its `documents` and for each how relevant it is, 0 or above; `number` is its place from 1.

    `relevance` is empty where the data do not say it.
    """

    text: str
    documents: tuple[str, ...]
    relevance: tuple[float, ...]
    number: int


def read(rows: Rows) -> list[Query]:
    """Return every row's query, in its order.

    The columns are `text` and `documents` with `label` (lists of as many), `text_pair` with `label`, or `text_pair` and
    `negative`; without a label and a negative the documents are to be judged. Raises UserError, naming the row, for a
    gap, for lists that do not fit, and for a relevance that is no number of 0 or above.
    """
    names = rows.dataset.column_names
    tokens.refuse_other_than_text(rows, [name for name in ("text", "text_pair", "negative") if name in names])
    for role, what in (("documents", "texts"), ("label", "numbers")):
        feature = rows.dataset.features.get(role)
        if "documents" in names and feature is not None and getattr(feature, "feature", None) is None:
            kind = getattr(feature, "dtype", type(feature).__name__)
            allowed = f"a list of {what} in each row, as JSON and Parquet have them"
            raise UserError(f"{rows.where}: data.columns.{role} names a column of type {kind}; allowed: {allowed}")
    return [_query(rows, index, row, names) for index, row in enumerate(rows.dataset)]


def by_text(queries: Sequence[Query]) -> list[list[tuple[int, int]]]:
    """Return for each text of a query where its documents are, as (place among `queries`, place in its documents).

    Pairs that share a query are one list.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for place, query in enumerate(queries):
        found.setdefault(query.text, []).extend((place, inner) for inner in range(len(query.documents)))
    return list(found.values())


def by_row(queries: Sequence[Query]) -> list[list[tuple[int, int]]]:
    """Return the documents as `by_text` does, those of each row by themselves."""
    return [[(place, inner) for inner in range(len(query.documents))] for place, query in enumerate(queries)]


def _query(rows: Rows, index: int, row: Mapping[str, Any], names: Sequence[str]) -> Query:
    place = rows.place(index)
    for name in names:
        if row[name] is None or row[name] == "":
            raise UserError(f"{place} has no {name}; allowed: one in every row")
    if "documents" in names:
        documents, raw = tuple(row["documents"]), tuple(row.get("label", ()))
        if "label" in names and len(documents) != len(raw):
            raise UserError(f"{place} has {len(documents)} documents and {len(raw)} labels; allowed: one for each")
        if not documents or not all(documents):
            what = "an empty document" if documents else "no documents"
            raise UserError(f"{place} has {what}; allowed: a text for each, one or more in every row")
    elif "negative" in names:
        documents, raw = (row["text_pair"], row["negative"]), (1.0, 0.0)
    else:
        documents, raw = (row["text_pair"],), (row["label"],) if "label" in names else ()
    relevance = []
    for one in raw:
        try:
            relevance.append(float(one))
        except (TypeError, ValueError):
            relevance.append(math.nan)
        if not math.isfinite(relevance[-1]) or relevance[-1] < 0:
            raise UserError(f"{place} has the label {brief(repr(one))}; allowed: 0 for irrelevant, and numbers above")
    return Query(row["text"], documents, tuple(relevance), rows.number(index))
