"""Sparse embeddings (SPLADE): texts become weights of words, by which an inverted index finds them.

A query's right document is to have the largest inner product with it among those of the batch, while few words keep a
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import embeddings, in_batch
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.tasks._embeddings import EmbeddingTask
from hf_mps.finetune.text import lengths
from hf_mps.metrics.table import METRICS

SHOWN = 5
"""Words of an embedding that predictions.csv shows."""
INNER, COST = "SparseMultipleNegativesRankingLoss", "FlopsLoss"
"""The loss inside SpladeLoss, and its own regularizer."""


class Columns(schema.Columns):
    """The columns of the data by their roles: a query, the document that answers it, and one that does not."""

    text: str = "query"
    """The column of the text."""
    text_pair: str = "document"
    """The column of the second text."""
    negative: str | None = None
    """The column of a wrong text."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(lengths.Padded):
    """Adds what a dimension costs in the loss, for documents and for queries: more makes sparser embeddings.

    The defaults are sentence-transformers' own.
    """

    task: Literal["sparse-embeddings"]
    """What the model learns to do."""
    data: Data
    document_regularizer: float = Field(default=3e-5, gt=0)
    """How much each dimension of a document costs."""
    query_regularizer: float = Field(default=5e-5, gt=0)
    """How much each dimension of a query costs."""


class SparseEmbeddings(EmbeddingTask):
    """Learns weights of words by which texts are found. A saved model scores pairs, and weighs the words of texts."""

    name = "sparse-embeddings"
    recipe_class = Recipe
    auto_class = "SparseEncoder"
    pipeline_tag = "feature-extraction"
    metrics = ("sparse_retrieval", "active_dims")
    truth = ("negative",)
    recipe: Recipe

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, library = self.recipe, embeddings.library(self.name)
        measured = self.measures()
        self.open_encoder()
        data, counts = self.encoded(rows)
        evaluator = SparseEvaluator(rows["validation"], data["validation"], measured, self.collator)
        losses, documents, asked = library.sparse_encoder.losses, recipe.document_regularizer, recipe.query_regularizer
        loss = losses.SpladeLoss(
            self.model,
            loss=in_batch.make(losses, INNER, self.model),
            document_regularizer=in_batch.make(losses, COST, self.model),
            query_regularizer=in_batch.make(losses, COST, self.model),
            document_regularizer_weight=documents,
            query_regularizer_weight=asked,
        )
        said = f"{INNER}, a dimension costs {documents:g} in documents and {asked:g} in queries"
        reason = "the other pairs of a batch are what a query is not about; the costs rise over a third of the steps"
        return self.made(
            splits=data,
            metrics=measured,
            baseline=evaluator.baseline(),
            choices={
                "lengths": self.length,
                "loss": Choice(said, reason),
                "sampling": embeddings.sampling(recipe, scored=False),
                **self.choices,
            },
            trainer=trainer(evaluator),
            arguments=library.SparseEncoderTrainingArguments,
            arguments_defaults=in_batch.arguments(ranked=True),
            trainer_settings={"loss": loss},
            token_counts=counts,
            predicted=(rows["validation"], evaluator),
            figures=pictures.ranks,
        )

    def encoder(self) -> Any:
        """Return the sparse encoder. Raises UserError where the checkpoint has no head that predicts words."""
        model = super().encoder()
        if type(model[-1]).__name__ != "SpladePooling":
            allowed = "allowed: masked language models, such as distilbert/distilbert-base-uncased"
            raise UserError(f"model {self.checkpoint.name}: it has no head that predicts masked words; {allowed}")
        return model

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the score of each pair of texts, or the words' weights of each text alone."""
        model = trainer.model
        found = [matrix(model, self.collator, some, embeddings.NAMES[role]) for role, some in texts.items()]
        for number, score in enumerate(embeddings.products(found[0], found[-1]).tolist()):
            line: dict[str, Any] = {role: some[number] for role, some in texts.items()}
            said = {"score": round(score, 4)} if len(found) > 1 else {"words": heaviest(model, found[0][number])}
            yield line | said

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return pairs of short generated texts about one thing, with a negative where the recipe has one."""
        named = recipe.data.columns
        rows: list[dict[str, Any]] = []
        for number, (asked, answer) in enumerate(synthetic.about_things()):
            rows.append({named.text: asked, named.text_pair: answer})
            if named.negative:
                rows[-1][named.negative] = synthetic.about_another(number)
        return {"train": rows[:16], "validation": rows[16:]}


def trainer(evaluator: Any) -> type[Any]:
    """Return sentence-transformers' SparseEncoderTrainer with what `evaluator` measures.

    The regularizers' weights rise from 0 over the first third of the steps, as its own default has it.
    """
    from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback

    measuring: Any = embeddings.trainer(evaluator, "SparseEncoderTrainer")

    class Sparse(measuring):  # type: ignore[misc]
        def __init__(self, *arguments: Any, loss: Any, callbacks: list[Any], **settings: Any) -> None:
            rising = SpladeRegularizerWeightSchedulerCallback(loss=loss)
            super().__init__(*arguments, loss=loss, callbacks=[rising, *callbacks], **settings)

    return Sparse


def matrix(model: Any, collator: Any, texts: Sequence[str], column: str) -> Any:
    """Return the embeddings of `texts` as a scipy matrix of shape (texts, words of the vocabulary)."""
    from scipy.sparse import csr_matrix, vstack

    return vstack([csr_matrix(row) for row in embeddings.vectors(model, collator, texts, column)], format="csr")


def heaviest(model: Any, row: Any, most: int | None = None) -> dict[str, float]:
    """Return the words of one embedding with their weights, by falling weight, `most` of them."""
    ordered = sorted(zip(row.data, row.indices, strict=True), reverse=True)[:most]
    words = model.tokenizer.convert_ids_to_tokens([int(place) for _, place in ordered])
    return {word: round(float(weight), 4) for word, (weight, _) in zip(words, ordered, strict=True)}


class SparseEvaluator(embeddings.EmbeddingEvaluator):
    """Measures a model on the validation rows by the inner products of its embeddings, and how sparse these are."""

    SIMILARITY = "score"

    def _embedded(self, model: Any, texts: list[str], column: str) -> Any:
        return matrix(model, self._collator, texts, column)

    def _metrics(self, embed: Callable[[list[str], str], Any]) -> dict[str, float]:
        queries, corpus = embed(self._texts["anchor"], "anchor"), embed(list(self._corpus), "positive")
        ranks, _ = self._ranks(queries, corpus)
        values = {"active_dims": (queries.nnz + corpus.nnz) / (queries.shape[0] + corpus.shape[0])}
        for name in self._measured.names:
            if (compute := METRICS[name].compute) is not None:
                values |= compute(ranks, [1] * len(ranks))
        return {name: float(values[name]) for name in self._measured.reported}

    def rows(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the rows of predictions.csv, each with the words that its query is found by."""
        weights = self._embedded(model, self._texts["anchor"], "anchor")
        for number, line in enumerate(super().rows(model)):
            yield {**line, "active_dims": int(weights[number].nnz), "words": heaviest(model, weights[number], SHOWN)}
