"""Summarization: the model reads a document and writes a short text that says the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

from hf_mps.finetune.data import synthetic
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks import _seq2seq
from hf_mps.metrics.texts import sentences

LEAD = 3


class Columns(_seq2seq.Columns):
    """The document and its summary."""

    source: str = "document"
    """The column of the source text."""
    target: str = "summary"
    """The column of the target text."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(_seq2seq.Recipe):
    """`source_prefix` is `summarize: ` for the first T5 models."""

    task: Literal["summarization"]
    """What the model learns to do."""
    data: Data


class Summarization(_seq2seq.Seq2SeqTask):
    """Learns to write a short text that says what a document says."""

    name = "summarization"
    recipe_class = Recipe
    architectures = ("ForConditionalGeneration",)
    metrics = ("rouge",)
    untrained = (
        f"answers with the first {LEAD} sentences of the document",
        lambda text: " ".join(sentences(text)[:LEAD]),
    )

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return made-up documents of eight sentences, the first of which is the summary."""
        draw, (source, target) = random.Random(recipe.seed), recipe.data.columns.roles().values()

        def row() -> dict[str, Any]:
            written = synthetic.sentences(draw, 8)
            return {source: " ".join(written), target: written[0]}

        return {split: [row() for _ in range(n)] for split, n in synthetic.splits().items()}
