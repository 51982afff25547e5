"""Summarization: a document read, a short text written that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_mps.finetune import recipe as recipes
from hf_mps.finetune.metrics.generation import sentences
from hf_mps.finetune.models import seq2seq
from hf_mps.finetune.models.seq2seq import ARGUMENTS, SETTLED

if TYPE_CHECKING:
    from hf_mps.finetune.data import Rows
    from hf_mps.finetune.models.checkpoint import Checkpoint
    from hf_mps.finetune.task import Prepared

__all__ = ["ARGUMENTS", "SETTLED", "Recipe", "prepare", "smoke_rows"]

LEAD = 3


class Columns(seq2seq.Columns):
    """The document and its summary."""

    source: str = "document"
    target: str = "summary"


class Data(recipes.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(seq2seq.Recipe):
    """`source_prefix` is `summarize: ` for the first T5 models."""

    task: Literal["summarization"]
    data: Data


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics. Raises UserError for what cannot be used."""
    kind = seq2seq.Kind(
        pipeline_tag="summarization",
        metrics=("rouge",),
        what=f"answers with the first {LEAD} sentences of the document",
        untrained=lambda text: " ".join(sentences(text)[:LEAD]),
        prefix="summarization",
    )
    return seq2seq.prepare(recipe, rows, checkpoint, kind, lambda tokenizer, model: None)


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Generated sentences, four to a document, of which the first is the summary."""
    from hf_mps.finetune import pairs

    source, target = recipe.data.columns.roles().values()
    made: dict[str, list[dict[str, Any]]] = {}
    for split, rows in pairs.generate(rows_train=96, rows_dev=16, seed=recipe.seed).items():
        texts = [f"{row['sentence1']} {row['sentence2']}" for row in rows]
        firsts = [row["sentence1"] for row in rows]
        made[split] = [{source: " ".join(texts[at : at + 2]), target: firsts[at]} for at in range(0, len(rows), 2)]
    return made
