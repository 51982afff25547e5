"""Sparse embeddings (SPLADE): texts become weights of words, by which an inverted index finds them.

A query's right document is to have the largest inner product with it among those of the batch, while few words keep a
weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import embeddings, in_batch, sparse
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.embeddings import ARGUMENTS, SETTLED
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths
from hf_mps.metrics.selection import choose

__all__ = ["ARGUMENTS", "OPTIONAL", "SETTLED", "TRUTH", "Recipe", "answer", "prepare", "smoke_rows"]

TRUTH = ("negative",)
OPTIONAL = ("text_pair",)
SNIPPET = """from sentence_transformers import SparseEncoder
model = SparseEncoder(".")
print(model.decode(model.encode_query("a query"), top_k=5))"""


class Columns(schema.Columns):
    """The columns of the data by their roles: a query, the document that answers it, and one that does not."""

    text: str = "query"
    text_pair: str = "document"
    negative: str | None = None


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(lengths.Padded):
    """Adds what a dimension costs in the loss, for documents and for queries: more makes sparser embeddings.

    The defaults are sentence-transformers' own.
    """

    task: Literal["sparse-embeddings"]
    data: Data
    document_regularizer: float = Field(default=3e-5, gt=0)
    query_regularizer: float = Field(default=5e-5, gt=0)


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make rows, model, loss and metrics from the rows of both splits.

    Raises UserError for lengths or a checkpoint that cannot be used, and without sentence-transformers.
    """
    library = embeddings.library(recipe.task)
    measured = choose(recipe.metrics, ("sparse_retrieval", "active_dims"), recipe.task)
    model, weights = sparse.load(checkpoint, device)
    longest = lengths.limit(recipe, model.tokenizer, checkpoint.config())
    model.max_seq_length = longest
    roles = list(recipe.data.columns.roles())
    encoded = {split: embeddings.encoded(rows[split], model.tokenizer, longest, roles) for split in rows}
    counts = {split: encoded[split]["lengths"][:] for split in encoded}
    flat = {split: list(itertools.chain(*counts[split])) for split in counts}
    length = lengths.decide(recipe, flat["train"], longest, others=itertools.chain(*flat.values()), grouped=False)
    data = {split: encoded[split].select_columns([embeddings.NAMES[role] for role in roles]) for split in SPLITS}
    collator = embeddings.collator(model, length.value, recipe.training.get("prompts"))
    evaluator = sparse.SparseEvaluator(rows["validation"], data["validation"], measured, collator)
    costs = (recipe.document_regularizer, recipe.query_regularizer)
    said = f"{sparse.INNER}, a dimension costs {costs[0]:g} in documents and {costs[1]:g} in queries"
    reason = "the other pairs of a batch are what a query is not about; the costs rise over a third of the steps"
    return Prepared(
        splits=data,
        model=model,
        processing_class=model.tokenizer,
        collator=collator,
        metrics=measured,
        compute_metrics=None,
        baseline=evaluator.baseline(),
        auto_class="SparseEncoder",
        library="sentence-transformers",
        pipeline_tag="feature-extraction",
        choices={
            "lengths": length,
            "loss": Choice(said, reason),
            "sampling": embeddings.sampling(recipe, scored=False),
            "model": weights,
        },
        trainer=sparse.trainer(evaluator),
        arguments=library.SparseEncoderTrainingArguments,
        arguments_defaults=in_batch.arguments(ranked=True),
        trainer_settings={"loss": sparse.loss(library.sparse_encoder.losses, model, *costs)},
        token_counts=[max(row) for row in counts["train"]],
        predict=lambda trainer: evaluator.rows(trainer.model),
        figures=pictures.ranks,
        snippet=SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved encoder weighs the words of texts, and scores pairs of them.

    Raises UserError for a checkpoint that cannot be used, and without sentence-transformers.
    """
    embeddings.library(recipe.task)
    opened = sparse.load(checkpoint, device)
    return embeddings.answering(
        recipe, checkpoint, chosen, opened, lambda trainer, *texts: sparse.answers(trainer.model, *texts)
    )


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return pairs of short generated texts about one thing, with a negative where the recipe has one."""
    named = recipe.data.columns
    rows: list[dict[str, Any]] = []
    for number, (asked, answer) in enumerate(synthetic.about_things()):
        rows.append({named.text: asked, named.text_pair: answer})
        if named.negative:
            rows[-1][named.negative] = synthetic.about_another(number)
    return {"train": rows[:16], "validation": rows[16:]}
