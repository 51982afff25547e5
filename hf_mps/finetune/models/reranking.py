"""What the task rerank takes from sentence-transformers: the cross-encoder's collator, trainer and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models import embeddings, in_batch
from hf_mps.finetune.text import tokens
from hf_mps.finetune.text.lengths import Lengths
from hf_mps.metrics import Baseline
from hf_mps.metrics.scores import ndcg, order, reciprocal_rank
from hf_mps.metrics.selection import Chosen
from hf_mps.metrics.table import METRICS

LISTED = ("LambdaLoss", "ListNetLoss", "RankNetLoss")
"""Losses over the documents of a query; the others are over single pairs."""
SIZES = "documents"
"""The column of a batch that says how many documents each of its queries has."""
BATCH = 32


def loss(losses: Any, name: str, model: Any) -> Any:
    """Return the loss `name` of sentence-transformers' module `losses`; a list's documents pass the model at once."""
    made: Callable[..., Any] = getattr(losses, name)
    return made(model, mini_batch_size=-1) if name in LISTED else made(model)


def encoder(stock: type[Any]) -> type[Any]:
    """Return the cross-encoder class `stock` with a `preprocess` that can look tokens up in place of making them.

    While `tokens` is set (a batch of `collator`), inputs are the numbers of a batch's pairs in place of their texts.
    """

    class Encoder(stock):  # type: ignore[misc]
        tokens: dict[str, Any] | None = None

        def preprocess(self, inputs: Any, **settings: Any) -> Any:
            if self.tokens is None:
                return super().preprocess(inputs, **settings)
            chosen = [number for _, number in inputs]
            whole = chosen == list(range(len(self.tokens["input_ids"])))
            picked = {name: tensor if whole else tensor[chosen] for name, tensor in self.tokens.items()}
            return {**picked, "modality": "text"}

    # Model cards and errors of sentence-transformers show the class's name.
    Encoder.__name__, Encoder.__qualname__, Encoder.__module__ = stock.__name__, stock.__qualname__, stock.__module__
    return Encoder


def collator(tokenizer: Any, length: Lengths) -> Any:
    """Return a collator for sentence-transformers' trainer: every pair of a batch a row of tokens, padded by a list.

    sentence-transformers tokenises within its losses, each batch to another length: Metal compiles a graph for each.
    """
    from sentence_transformers.cross_encoder.data_collator import CrossEncoderDataCollator
    from transformers import DataCollatorWithPadding

    pad = length.collator(DataCollatorWithPadding(tokenizer), tokenizer)

    class Pairs(CrossEncoderDataCollator):  # type: ignore[misc]
        def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
            import torch

            names = [name for name in features[0] if name != "label"]
            columns = [[row[name] for name in names] for row in features]
            pairs = [dict(zip(names, one, strict=True)) for row in columns for one in zip(*row, strict=True)]
            relevance = [value for row in features for value in row["label"]]
            return {
                **pad(pairs),
                "label": torch.tensor(relevance, dtype=torch.float32),
                SIZES: [len(row["label"]) for row in features],
            }

    return Pairs(preprocess_fn=None)


def trainer(evaluator: RerankEvaluator, *, listed: bool) -> type[Any]:
    """Return sentence-transformers' trainer class over batches of `collator`, with what `evaluator` measures.

    Its losses are handed the numbers of a batch's pairs in place of their texts, and the model (`encoder`) looks up the
    tokens of those pairs. With `listed` the loss gets lists of documents.
    """
    measuring: Any = embeddings.trainer(evaluator, "CrossEncoderTrainer")

    class Reranking(measuring):  # type: ignore[misc]
        def collect_features(self, inputs: dict[str, Any]) -> tuple[list[Any], Any]:
            relevance, sizes = inputs.pop("label"), inputs.pop(SIZES)
            numbers = list(range(len(relevance)))
            self.model.tokens = dict(inputs)
            if not listed:
                return [numbers, numbers], relevance
            ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
            documents = [numbers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            return [list(range(len(sizes))), documents], list(relevance.split(sizes))

        def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
            try:
                return super().compute_loss(*arguments, **settings)
            finally:
                self.model.tokens = None

    return Reranking


class RerankEvaluator:
    """Measures a model on the validation queries, by the order or the scores that it gives their documents."""

    def __init__(
        self, found: Sequence[Query], encoded: Any, measured: Chosen | None, pad: Callable[[list[dict[str, Any]]], Any]
    ) -> None:
        self._queries, self._encoded, self._measured, self._collator = found, encoded, measured, pad
        # Documents that are to be judged come by and by: only those of a row are known together.
        by_row = [[(place, inner) for inner in range(len(query.documents))] for place, query in enumerate(found)]
        self._groups = by_text(found) if measured is not None else by_row

    @property
    def without(self) -> int:
        """How many queries have no relevant document, or none else: no order of theirs is better than another."""
        return sum(not _can_rank(self._relevance(group)) for group in self._groups)

    def measure(self, model: Any) -> dict[str, float]:
        """Return the metrics of `model` on the validation queries."""
        return self._metrics(self._scores(model))

    def baseline(self) -> Baseline:
        """Return what the words that a query shares with its documents achieve."""
        from sklearn.feature_extraction.text import HashingVectorizer

        counts = HashingVectorizer(token_pattern=r"\w+", alternate_sign=False)
        scores = []
        for query in self._queries:
            asked, answers = counts.transform([query.text]), counts.transform(query.documents)
            scores.append((answers @ asked.T).toarray().ravel().tolist())
        return Baseline("ranks by the words that query and document share", self._metrics(scores))

    def rows(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv, one for each document, with its rank among those of its query."""
        scores = self._scores(model)
        ranks: dict[tuple[int, int], int] = {}
        for group in self._groups:
            ordered = order([scores[place][inner] for place, inner in group], self._relevance(group))
            ranks |= {group[number]: rank for rank, number in enumerate(ordered, 1)}
        for place, query in enumerate(self._queries):
            for inner, document in enumerate(query.documents):
                line: dict[str, Any] = {"row": query.number, "text": query.text, "document": document}
                if query.relevance:
                    line["label"] = query.relevance[inner]
                line["score"] = round(scores[place][inner], 4)
                if query.relevance or len(query.documents) > 1:
                    line["rank"] = ranks[place, inner]
                yield line

    def _relevance(self, group: Sequence[tuple[int, int]]) -> list[float]:
        known = [(self._queries[place].relevance, inner) for place, inner in group]
        return [relevance[inner] if relevance else 0.0 for relevance, inner in known]

    def _metrics(self, scores: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the metrics of each query's scores of its documents."""
        values: dict[str, float] = {}
        assert self._measured is not None
        if "rerank" in self._measured.names:
            sides = [([scores[at][inner] for at, inner in group], self._relevance(group)) for group in self._groups]
            ranked = [(given, truths) for given, truths in sides if _can_rank(truths)] or sides
            for name, formula in (("ndcg@10", ndcg), ("mrr@10", reciprocal_rank)):
                values[name] = sum(formula(*one) for one in ranked) / len(ranked)
        sides_by_query = (scores, [query.relevance for query in self._queries])
        given, truths = ([value for row in side for value in row] for side in sides_by_query)
        for name in self._measured.names:
            if (compute := METRICS[name].compute) is not None:
                values |= compute(given, truths)
        return self._measured.of(values)

    def _scores(self, model: Any) -> list[list[float]]:
        """Return the logit of each document of each query; pairs of like length share a batch.

        Where there are several processes each scores a batch of every so many, and all get all.
        """
        pairs = [(place, inner) for place, row in enumerate(self._queries) for inner in range(len(row.documents))]
        columns = [{name: row[name] for name in row if name != "label"} for row in self._encoded]
        rows = [{name: column[inner] for name, column in columns[place].items()} for place, inner in pairs]

        def scored(numbers: Sequence[int]) -> Any:
            batch = self._collator([rows[number] for number in numbers])
            return model({name: value.to(model.device) for name, value in batch.items()})["scores"].view(-1).float()

        by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]["input_ids"]))
        found = iter(in_batch.each_once(model, by_length, BATCH, scored))
        return [[float(next(found)) for _ in query.documents] for query in self._queries]


def _can_rank(relevance: Sequence[float]) -> bool:
    return max(relevance) > 0 and min(relevance) < max(relevance)


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
    for one in raw:
        if not 0 <= labels.number(one) < math.inf:
            raise UserError(f"{place} has the label {brief(repr(one))}; allowed: 0 for irrelevant, and numbers above")
    return Query(row["text"], documents, tuple(map(float, raw)), rows.number(index))
