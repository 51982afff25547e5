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
            relevance = torch.tensor([value for row in features for value in row["label"]], dtype=torch.float32)
            return {**pad(pairs), "label": relevance, SIZES: [len(row["label"]) for row in features]}

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
        self._pairs = [(query, document) for query in found for document in query.documents]
        self._relevance = [one for query in found for one in query.relevance or [0.0] * len(query.documents)]
        # Documents that are to be judged come by and by: only those of a row are known together.
        groups: dict[Any, list[int]] = {}
        for place, (query, _) in enumerate(self._pairs):
            groups.setdefault(query.number if measured is None else query.text, []).append(place)
        self._groups = list(groups.values())

    @property
    def without(self) -> int:
        """How many queries have no relevant document, or none else: no order of theirs is better than another."""
        return sum(not _can_rank([self._relevance[place] for place in group]) for group in self._groups)

    def measure(self, model: Any) -> dict[str, float]:
        """Return the metrics of `model` on the validation queries."""
        return self._metrics(self._scores(model))

    def baseline(self) -> Baseline:
        """Return what the words that a query shares with its documents achieve."""
        from sklearn.feature_extraction.text import HashingVectorizer

        counts = HashingVectorizer(token_pattern=r"\w+", alternate_sign=False)
        scores: list[float] = []
        for query in self._queries:
            asked, answers = counts.transform([query.text]), counts.transform(query.documents)
            scores += (answers @ asked.T).toarray().ravel().tolist()
        return Baseline("ranks by the words that query and document share", self._metrics(scores))

    def rows(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv, one for each document, with its rank among those of its query."""
        scores = self._scores(model)
        ranks: dict[int, int] = {}
        for group in self._groups:
            ranks |= {group[number]: rank for rank, number in enumerate(order(*self._of(group, scores)), 1)}
        for place, (query, document) in enumerate(self._pairs):
            line: dict[str, Any] = {"row": query.number, "text": query.text, "document": document}
            if query.relevance:
                line["label"] = self._relevance[place]
            line["score"] = round(scores[place], 4)
            if query.relevance or len(query.documents) > 1:
                line["rank"] = ranks[place]
            yield line

    def _of(self, group: Sequence[int], scores: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the scores and the relevance of a query's documents."""
        return [scores[place] for place in group], [self._relevance[place] for place in group]

    def _metrics(self, scores: Sequence[float]) -> dict[str, float]:
        """Return the metrics of the scores of all documents."""
        values: dict[str, float] = {}
        assert self._measured is not None
        if "rerank" in self._measured.names:
            sides = [self._of(group, scores) for group in self._groups]
            ranked = [(given, truths) for given, truths in sides if _can_rank(truths)] or sides
            for name, formula in (("ndcg@10", ndcg), ("mrr@10", reciprocal_rank)):
                values[name] = sum(formula(*one) for one in ranked) / len(ranked)
        return self._measured.of(values | self._measured.computed(scores, self._relevance))

    def _scores(self, model: Any) -> list[float]:
        """Return the logit of each document; pairs of like length share a batch.

        Where there are several processes each scores a batch of every so many, and all get all.
        """
        columns = [{name: row[name] for name in row if name != "label"} for row in self._encoded]
        rows = [dict(zip(row, one, strict=True)) for row in columns for one in zip(*row.values(), strict=True)]

        def scored(numbers: Sequence[int]) -> Any:
            batch = self._collator([rows[number] for number in numbers])
            return model({name: value.to(model.device) for name, value in batch.items()})["scores"].view(-1).float()

        by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]["input_ids"]))
        return [float(one) for one in in_batch.each_once(model, by_length, BATCH, scored)]


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
        inner = getattr(getattr(feature, "feature", None), "dtype", None)
        wrong = inner is None or (role == "documents" and inner not in tokens.TEXT)
        if "documents" in names and feature is not None and wrong:
            kind = f"list of {inner}" if inner else getattr(feature, "dtype", type(feature).__name__)
            allowed = f"a list of {what} in each row, as JSON and Parquet have them"
            raise UserError(f"{rows.where}: data.columns.{role} names a column of type {kind}; allowed: {allowed}")
    return [_query(rows, index, row, names) for index, row in enumerate(rows.dataset)]


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
