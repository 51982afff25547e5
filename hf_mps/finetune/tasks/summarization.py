"""Summarization: the model reads a document and writes a short text that says the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import seq2seq
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.seq2seq import ARGUMENTS, SETTLED, TRUTH
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.metrics.texts import sentences

__all__ = ["ARGUMENTS", "SETTLED", "TRUTH", "Recipe", "answer", "prepare", "smoke_rows"]

LEAD = 3
KIND = seq2seq.Seq2SeqTask(
    pipeline_tag="summarization",
    metrics=("rouge",),
    what=f"answers with the first {LEAD} sentences of the document",
    untrained=lambda text: " ".join(sentences(text)[:LEAD]),
    prefix="summarization",
)


class Columns(seq2seq.Columns):
    """The document and its summary."""

    source: str = "document"
    target: str = "summary"


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(seq2seq.Recipe):
    """`source_prefix` is `summarize: ` for the first T5 models."""

    task: Literal["summarization"]
    data: Data


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics. Raises UserError for what cannot be used."""
    return seq2seq.prepare(recipe, rows, checkpoint, KIND, lambda tokenizer, model: None)


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model summarizes. Raises UserError for a checkpoint that cannot be used."""
    return seq2seq.answer(recipe, checkpoint, chosen, KIND, lambda tokenizer, model: None)


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return made-up documents of eight sentences, the first of which is the summary."""
    draw, (source, target) = random.Random(recipe.seed), recipe.data.columns.roles().values()

    def row() -> dict[str, Any]:
        written = synthetic.sentences(draw, 8)
        return {source: " ".join(written), target: written[0]}

    return {split: [row() for _ in range(n)] for split, n in synthetic.splits().items()}
