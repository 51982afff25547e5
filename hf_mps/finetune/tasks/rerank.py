"""Reranking: a cross-encoder reads a query with a document and scores how relevant that is, by sentence-transformers.

It reads both texts together and so judges better than embeddings, but can encode nothing ahead: search engines let it
sort the few documents that a faster method found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import embeddings
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Dataset, Prepared
from hf_mps.finetune.tasks.embeddings import DRAWN, SentenceTask
from hf_mps.finetune.text import lengths, tokens
from hf_mps.finetune.text.lengths import Lengths
from hf_mps.metrics import Baseline
from hf_mps.metrics.scores import ndcg, order, reciprocal_rank
from hf_mps.metrics.selection import Chosen, choose

Loss = Literal["BinaryCrossEntropyLoss", "LambdaLoss", "ListNetLoss", "RankNetLoss"]
# Documents of a generated query: about as many as MS MARCO has, for a plan counts them.
OF_A_QUERY = 8
COMPARED = "the documents of a query are compared; LambdaLoss, which weighs places, makes Metal wait at each step"


class Columns(schema.Columns):
    """The columns of the data by their roles: the query is `text`.

    Its documents are a list (`documents`, with a list of as many in `label`), one a row (`text_pair`, with `label`), or
    a right and a wrong one (`text_pair` and `negative`). A label is 0 or above: how relevant the document is.
    """

    text: str = "query"
    """The column of the text."""
    documents: str | None = None
    """The column of lists of documents."""
    text_pair: str | None = None
    """The column of the second text."""
    negative: str | None = None
    """The column of a wrong text."""
    label: str | None = None
    """The column of the label."""

    def wrong(self) -> Iterator[str]:
        if bool(self.documents) == bool(self.text_pair):
            both = "documents and text_pair" if self.documents else "neither documents nor text_pair"
            yield f"has {both}; give one of the two"
        if self.negative and self.documents:
            yield "has negative beside documents; leave it out"
        if bool(self.label) == bool(self.negative):
            given = "label beside negative" if self.label else "neither label nor negative"
            yield f"has {given}; give one of the two"


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns(documents="documents", label="labels")


class Recipe(labels.Overridden, lengths.Padded):
    """Adds the loss, and `config_overrides`."""

    data: Data
    loss: Loss | None = None
    """sentence-transformers' loss; by default the one that suits the columns."""

    def wrong(self) -> Iterator[str]:
        if self.loss in LISTED and self.data.columns.text_pair and not self.data.columns.negative:
            told = f"has loss {self.loss}, which compares the documents of a row, and these have one each"
            yield f"{told}; allowed: BinaryCrossEntropyLoss, or data.columns.documents"


class Rerank(SentenceTask[Recipe]):
    """Learns how relevant a document is to a query. A saved model scores documents, and ranks those of a row."""

    auto_class = "CrossEncoder"
    pipeline_tag = "text-ranking"
    truth = ("label", "negative")
    settled = embeddings.SETTLED | {
        "train_sampling_strategy": "sentence-transformers draws its batches itself; leave it out",
        "batch_sampler": "a row has its own documents, and none of another row is one of its wrong ones; leave it out",
        "prompts": "a cross-encoder reads query and document as they are; leave it out",
    }

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, library = self.recipe, embeddings.library(self.name)
        found = {split: read(rows[split]) for split in rows}
        graded = any(value not in (0.0, 1.0) for query in found["validation"] for value in query.relevance)
        texts = [query.text for query in found["validation"] for _ in query.documents]
        ordered = len(set(texts)) < len(texts)
        allowed = ("spearmanr", "pearsonr", "mse", "rerank") if graded else ("average_precision", "rerank")
        usual = ("rerank",) if ordered else allowed[:2] if graded else allowed[:1]
        measured = choose(recipe.metrics or usual, allowed, recipe.task)
        loss = recipe.loss or ("BinaryCrossEntropyLoss" if recipe.data.columns.text_pair else "ListNetLoss")
        listed = loss in LISTED
        for split, some in found.items():
            for query in some if not listed else ():
                if (most := max(query.relevance)) > 1:  # the loss takes it for a probability
                    told = f"row {query.number} has the label {most:g}, and {loss} takes 0 to 1"
                    way_on = "next: labels of that range, or for lists of documents loss=LambdaLoss"
                    raise UserError(f"{rows[split].where}: {told}; {way_on}")
        self.begin()
        encoded = {split: _encoded(rows[split], found[split], self.tokenizer, self.longest) for split in rows}
        counts = {split: [[len(ids) for ids in row] for row in encoded[split]["input_ids"][:]] for split in encoded}
        self.choose_lengths(counts)
        evaluator = RerankEvaluator(found["validation"], encoded["validation"], measured, self.padding())
        # A list's documents pass the model at once.
        at_once = {"mini_batch_size": -1} if listed else {}
        why = COMPARED if listed else "each pair is judged by itself, relevant or not"
        return self.made(
            splits={split: encoded[split] for split in SPLITS},
            collator=collator(self.tokenizer, self.length.value),
            metrics=measured,
            baseline=evaluator.baseline(),
            choices={
                "lengths": self.length,
                "loss": Choice(loss, "loss in the recipe" if recipe.loss else why),
                "queries": _described(found["train"], evaluator.without if "rerank" in measured.names else 0),
                "sampling": DRAWN,
                **self.choices,
            },
            trainer=trainer(evaluator, listed=listed),
            arguments=library.CrossEncoderTrainingArguments,
            arguments_defaults=embeddings.arguments(ranked=False),
            trainer_settings={"loss": getattr(library.cross_encoder.losses, loss)(self.model, **at_once)},
            token_counts=[max(row) for row in counts["train"]],
            predicted=(rows["validation"], evaluator),
            figures=pictures.relevance,
        )

    def inputs(self, rows: Rows) -> RerankEvaluator:
        found = read(rows)
        encoded = _encoded(rows, found, self.tokenizer, self.longest)
        return RerankEvaluator(found, encoded, None, self.padding())

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Any:
        return inputs.rows(trainer.model)

    def opened(self) -> tuple[Any, str]:
        """Return the cross-encoder. Raises UserError for a configuration without a key that the recipe sets."""
        labels.override(self.checkpoint.config(), self.recipe.config_overrides)  # refuses a key that it does not have
        model = self.checkpoint.of_sentence_transformers(self.auto_class, self.device, self.recipe.config_overrides)
        return model, f"{type(model[0].model).__name__} with one score"

    def padding(self) -> Any:
        """Return the collator of pairs."""
        from transformers import DataCollatorWithPadding

        return self.length.value.collator(DataCollatorWithPadding(self.tokenizer), self.tokenizer)

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a query that names a kind of thing, and documents of sentences about one kind each."""
        draw, named, kind = made.draw, recipe.data.columns, made.kind(4)
        kinds = [kind, *draw.choices([other for other in range(4) if other != kind], k=OF_A_QUERY - 1)]
        draw.shuffle(kinds)
        texts = [synthetic.sentence(draw, one) for one in kinds]
        row: dict[str, Any] = {"text": f"which one was {synthetic.word(draw, kind)}"}
        if named.documents:
            return row | {"documents": texts, "label": [int(one == kind) for one in kinds]}
        right = texts[kinds.index(kind)]
        wrong = next(text for text, one in zip(texts, kinds, strict=True) if one != kind)
        if named.negative:
            return row | {"text_pair": right, "negative": wrong}
        label = draw.randrange(2)
        return row | {"text_pair": right if label else wrong, "label": label}


def _described(train: Sequence[Query], without: int) -> Choice[str]:
    documents = sum(len(query.documents) for query in train)
    relevant = sum(value > 0 for query in train for value in query.relevance)
    reason = f"{relevant / documents:.0%} of the training documents are relevant"
    if without:
        reason += f"; {without} of the validation queries have no order to measure, with all documents alike"
    return Choice(f"{len(train)} with {documents / len(train):.1f} documents each", reason)


def _encoded(rows: Rows, found: Sequence[Query], tokenizer: Any, longest: int) -> Dataset:
    """Return the model's columns, each a list with an entry for each document of a row, and their relevance."""

    # Not every tokenizer makes the same columns: token_type_ids are BERT's.
    names = list(tokenizer("a", "b"))

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        made: dict[str, list[Any]] = {name: [] for name in (*names, "label")}
        for index in indices:
            query = found[index]
            asked = [query.text] * len(query.documents)
            encoded = tokenizer(asked, list(query.documents), truncation="longest_first", max_length=longest)
            for name in names:
                made[name].append(encoded[name])
            made["label"].append(list(query.relevance))
        return made

    kinds = {**dict.fromkeys(names, (("int32",),)), "label": ("float32",)}
    key = ("rerank", longest, sorted(rows.dataset.column_names))
    return tokens.map_cached(rows, encode, content=tokens.digest(tokenizer), key=key, features=kinds)


LISTED = ("LambdaLoss", "ListNetLoss", "RankNetLoss")
"""Losses over the documents of a query; the others are over single pairs."""
SIZES = "documents"
"""The column of a batch that says how many documents each of its queries has."""
BATCH = 32


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
        return [float(one) for one in embeddings.each_once(model, by_length, BATCH, scored)]


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
