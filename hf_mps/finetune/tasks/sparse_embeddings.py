"""Sparse embeddings (SPLADE): texts become weights of words, by which an inverted index finds them.

A query's right document is to have the largest inner product with it among those of the batch, while few words keep a
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import embeddings, in_batch, sparse
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.tasks._embeddings import EmbeddingTask
from hf_mps.finetune.text import lengths


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
        self.begin(self.open_encoder())
        data, counts = self.encoded(rows)
        evaluator = sparse.SparseEvaluator(rows["validation"], data["validation"], measured, self.collator)
        costs = (recipe.document_regularizer, recipe.query_regularizer)
        said = f"{sparse.INNER}, a dimension costs {costs[0]:g} in documents and {costs[1]:g} in queries"
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
            trainer=sparse.trainer(evaluator),
            arguments=library.SparseEncoderTrainingArguments,
            arguments_defaults=in_batch.arguments(ranked=True),
            trainer_settings={"loss": sparse.loss(library.sparse_encoder.losses, self.model, *costs)},
            token_counts=counts,
            predicted=(rows["validation"], evaluator),
            figures=pictures.ranks,
        )

    def open_encoder(self) -> tuple[Any, Choice[str]]:
        return sparse.load(self.checkpoint, self.device)

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
        return sparse.answers(trainer.model, self.collator, texts)

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
