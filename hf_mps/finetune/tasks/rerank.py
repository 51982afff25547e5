"""Reranking: a cross-encoder reads a query with a document and scores how relevant that is, by sentence-transformers.

It reads both texts together and so judges better than embeddings, but can encode nothing ahead: search engines let it
sort the few documents that a faster method found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import embeddings, in_batch, reranking
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Dataset, Prepared
from hf_mps.finetune.tasks.embeddings import SentenceTask
from hf_mps.finetune.text import buckets, lengths, tokens
from hf_mps.metrics.selection import choose

Loss = Literal["BinaryCrossEntropyLoss", "LambdaLoss", "ListNetLoss", "RankNetLoss"]
# Documents of a generated query: about as many as MS MARCO has, for a plan counts them.
LISTED = 8
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

    @model_validator(mode="after")
    def _one_kind(self) -> Columns:
        if bool(self.documents) == bool(self.text_pair):
            both = "documents and text_pair" if self.documents else "neither documents nor text_pair"
            raise ValueError(f"has {both}; give one of the two")
        if self.negative and self.documents:
            raise ValueError("has negative beside documents; leave it out")
        if bool(self.label) == bool(self.negative):
            given = "label beside negative" if self.label else "neither label nor negative"
            raise ValueError(f"has {given}; give one of the two")
        return self


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns(documents="documents", label="labels")


class Recipe(labels.Overridden, lengths.Padded):
    """Adds the loss, and `config_overrides`."""

    data: Data
    loss: Loss | None = None
    """sentence-transformers' loss; by default the one that suits the columns."""

    @model_validator(mode="after")
    def _lists(self) -> Recipe:
        if self.loss in reranking.LISTED and self.data.columns.text_pair and not self.data.columns.negative:
            told = f"has loss {self.loss}, which compares the documents of a row, and these have one each"
            raise ValueError(f"{told}; allowed: BinaryCrossEntropyLoss, or data.columns.documents")
        return self


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
        found = {split: reranking.read(rows[split]) for split in rows}
        graded = any(value not in (0.0, 1.0) for query in found["validation"] for value in query.relevance)
        texts = [query.text for query in found["validation"] for _ in query.documents]
        ordered = len(set(texts)) < len(texts)
        allowed = ("spearmanr", "pearsonr", "mse", "rerank") if graded else ("average_precision", "rerank")
        usual = ("rerank",) if ordered else allowed[:2] if graded else allowed[:1]
        measured = choose(recipe.metrics or usual, allowed, recipe.task)
        loss = recipe.loss or ("BinaryCrossEntropyLoss" if recipe.data.columns.text_pair else "ListNetLoss")
        listed = loss in reranking.LISTED
        for split, some in found.items():
            for query in some if not listed else ():
                if (most := max(query.relevance)) > 1:  # the loss takes it for a probability
                    told = f"row {query.number} has the label {most:g}, and {loss} takes 0 to 1"
                    way_on = "next: labels of that range, or for lists of documents loss=LambdaLoss"
                    raise UserError(f"{rows[split].where}: {told}; {way_on}")
        self.begin(self._opened())
        encoded = {split: _encoded(rows[split], found[split], self.tokenizer, self.longest) for split in rows}
        counts = {split: [[len(ids) for ids in row] for row in encoded[split]["input_ids"][:]] for split in encoded}
        self.choose_lengths(counts)
        evaluator = reranking.RerankEvaluator(found["validation"], encoded["validation"], measured, self._padding())
        why = COMPARED if listed else "each pair is judged by itself, relevant or not"
        return self.made(
            splits={split: encoded[split] for split in SPLITS},
            collator=reranking.collator(self.tokenizer, self.length.value),
            metrics=measured,
            baseline=evaluator.baseline(),
            choices={
                "lengths": self.length,
                "loss": Choice(loss, "loss in the recipe" if recipe.loss else why),
                "queries": _described(found["train"], evaluator.without if "rerank" in measured.names else 0),
                "sampling": Choice(buckets.RANDOM, "sentence-transformers draws its batches itself"),
                **self.choices,
            },
            trainer=reranking.trainer(evaluator, listed=listed),
            arguments=library.CrossEncoderTrainingArguments,
            arguments_defaults=in_batch.arguments(ranked=False),
            trainer_settings={"loss": reranking.loss(library.cross_encoder.losses, loss, self.model)},
            token_counts=[max(row) for row in counts["train"]],
            predicted=(rows["validation"], evaluator),
            figures=pictures.relevance,
        )

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        embeddings.library(self.name)
        self.begin(self._opened(), chosen)
        return self.made(collator=self._padding())

    def inputs(self, rows: Rows) -> reranking.RerankEvaluator:
        found = reranking.read(rows)
        encoded = _encoded(rows, found, self.tokenizer, self.longest)
        return reranking.RerankEvaluator(found, encoded, None, self._padding())

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Any:
        return inputs.rows(trainer.model)

    def _opened(self) -> tuple[Any, Choice[str]]:
        labels.override(self.checkpoint.config(), self.recipe.config_overrides)  # refuses a key that it does not have
        model = self.checkpoint.of_sentence_transformers(self.auto_class, self.device, self.recipe.config_overrides)
        count = sum(parameter.numel() for parameter in model.parameters())
        kind = type(model[0].model).__name__
        return model, Choice(self.checkpoint.name, f"{kind} with one score, {count / 1e6:.1f} M parameters")

    def _padding(self) -> Any:
        from transformers import DataCollatorWithPadding

        return self.length.value.collator(DataCollatorWithPadding(self.tokenizer), self.tokenizer)

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a query that names a kind of thing, and documents of sentences about one kind each."""
        draw, named, kind = made.draw, recipe.data.columns, made.kind(4)
        kinds = [kind, *draw.choices([other for other in range(4) if other != kind], k=LISTED - 1)]
        draw.shuffle(kinds)
        texts = [synthetic.sentence(draw, one) for one in kinds]
        row: dict[str, Any] = {named.text: f"which one was {synthetic.word(draw, kind)}"}
        if named.documents:
            return row | {named.documents: texts, str(named.label): [int(one == kind) for one in kinds]}
        right = texts[kinds.index(kind)]
        wrong = next(text for text, one in zip(texts, kinds, strict=True) if one != kind)
        if named.negative:
            return row | {str(named.text_pair): right, named.negative: wrong}
        label = draw.randrange(2)
        return row | {str(named.text_pair): right if label else wrong, str(named.label): label}


def _described(train: Sequence[reranking.Query], without: int) -> Choice[str]:
    documents = sum(len(query.documents) for query in train)
    relevant = sum(value > 0 for query in train for value in query.relevance)
    reason = f"{relevant / documents:.0%} of the training documents are relevant"
    if without:
        reason += f"; {without} of the validation queries have no order to measure, with all documents alike"
    return Choice(f"{len(train)} with {documents / len(train):.1f} documents each", reason)


def _encoded(rows: Rows, found: Sequence[reranking.Query], tokenizer: Any, longest: int) -> Dataset:
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
