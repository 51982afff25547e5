"""Sentence embeddings: texts become vectors whose cosine is their similarity, trained by sentence-transformers.

Pairs with a score learn the score; pairs without one learn that the second text is the batch's nearest to the first,
and that a third, the hard negative, is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import embeddings, in_batch
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.tasks._embeddings import EmbeddingTask
from hf_mps.finetune.text import lengths
from hf_mps.metrics.selection import choose

Loss = Literal["CosineSimilarityLoss", "CoSENTLoss", "MultipleNegativesRankingLoss"]
SCORED: tuple[Loss, ...] = ("CosineSimilarityLoss", "CoSENTLoss")
RANKED: tuple[Loss, ...] = ("MultipleNegativesRankingLoss",)


class Columns(schema.Columns):
    """The columns of the data by their roles: `score` for pairs with a score, `negative` only without one."""

    text: str = "text"
    """The column of the text."""
    text_pair: str = "text_pair"
    """The column of the second text."""
    negative: str | None = None
    """The column of a wrong text."""
    score: str | None = None
    """The column of how alike two texts are."""

    @model_validator(mode="after")
    def _one_kind(self) -> Columns:
        if self.negative and self.score:
            raise ValueError("has negative beside score; leave one of them out")
        return self


class Data(schema.Data):
    """Adds the columns, and `score_range`: the scores of no similarity and of identity."""

    columns: Columns = Columns()
    score_range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """The lowest and the highest score of the data."""

    @model_validator(mode="after")
    def _rising(self) -> Data:
        if self.score_range is not None and self.score_range[0] >= self.score_range[1]:
            raise ValueError(f"has score_range {self.score_range}; allowed: [low, high]")
        return self


class Recipe(lengths.Padded):
    """Adds the loss, by its class name in sentence-transformers; it defaults to what suits the data."""

    task: Literal["sentence-embeddings"]
    """What the model learns to do."""
    data: Data
    loss: Loss | None = None
    """sentence-transformers' loss; by default the one that suits the columns."""

    @model_validator(mode="after")
    def _suits(self) -> Recipe:
        allowed = SCORED if self.data.columns.score else RANKED
        if self.loss is not None and self.loss not in allowed:
            said = "with" if self.data.columns.score else "without"
            raise ValueError(f"has loss {self.loss}, and the pairs are {said} a score; allowed: {', '.join(allowed)}")
        return self


class SentenceEmbeddings(EmbeddingTask):
    """Learns vectors whose cosine is the similarity of texts. A saved model compares pairs, and embeds texts alone."""

    name = "sentence-embeddings"
    recipe_class = Recipe
    auto_class = "SentenceTransformer"
    pipeline_tag = "sentence-similarity"
    truth = ("negative", "score")
    recipe: Recipe

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, library = self.recipe, embeddings.library(self.name)
        scored = recipe.data.columns.score is not None
        measured = metrics.load(choose(recipe.metrics, ["sts" if scored else "retrieval"], recipe.task).names)
        self.open_encoder()
        span = _span(recipe, rows) if scored else Choice((0.0, 1.0), "")
        data, counts = self.encoded(rows, span.value)
        loss = recipe.loss or (SCORED if scored else RANKED)[0]
        why = "the other pairs of a batch are what a text is not about: a larger batch is a harder lesson"
        why = "the pairs have a score, which the cosine is to equal" if scored else why
        evaluator = embeddings.EmbeddingEvaluator(rows["validation"], data["validation"], measured, self.collator)
        return self.made(
            splits=data,
            metrics=measured,
            baseline=evaluator.baseline(),
            choices={
                "lengths": self.length,
                "loss": Choice(loss, "loss in the recipe" if recipe.loss else why),
                **({"scores": Choice(f"{span.value[0]:g} to {span.value[1]:g}", span.reason)} if scored else {}),
                "sampling": embeddings.sampling(recipe, scored=scored),
                **self.choices,
            },
            trainer=embeddings.trainer(evaluator),
            arguments=library.SentenceTransformerTrainingArguments,
            arguments_defaults=in_batch.arguments(ranked=not scored),
            trainer_settings={"loss": in_batch.make(library.sentence_transformer.losses, loss, self.model)},
            token_counts=counts,
            predicted=(rows["validation"], evaluator),
            figures=pictures.similarities if scored else pictures.ranks,
        )

    def compared(self, trainer: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the cosine of each pair of texts, or the embedding of each text alone."""
        size = trainer.args.eval_batch_size
        found = [
            embeddings.embedded(trainer.model, self.collator, some, embeddings.NAMES[role], size)
            for role, some in texts.items()
        ]
        for number, cosine in enumerate((found[0] * found[-1]).sum(axis=1).tolist()):
            line = {role: some[number] for role, some in texts.items()}
            yield line | ({"embedding": found[0][number]} if len(texts) == 1 else {"cosine": round(cosine, 4)})

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return pairs of short texts about one thing, with a score or a negative where the recipe has them."""
        named = recipe.data.columns
        rows: list[dict[str, Any]] = []
        for number, (text, other) in enumerate(synthetic.about_things()):
            row: dict[str, Any] = {named.text: text, named.text_pair: other}
            if named.negative:
                row[named.negative] = synthetic.about_another(number)
            if named.score:
                low, high = recipe.data.score_range or (0.0, 5.0)
                row[named.score] = float(high) if number % 2 else low + (high - low) / 10 * (number % 5)
                row[named.text_pair] = (
                    row[named.text_pair] if number % 2 else f"Kofi sleeps near the {synthetic.THINGS[number % 6]}."
                )
            rows.append(row)
        return {"train": rows[:16], "validation": rows[16:]}


def _span(recipe: Recipe, rows: Mapping[str, Rows]) -> Choice[tuple[float, float]]:
    """Return the lowest and highest score. Raises UserError, naming the row, for a score outside of them or not
    finite.
    """
    found = {
        split: [_number(rows[split], at, raw) for at, raw in enumerate(rows[split].dataset["score"])] for split in rows
    }
    low, high = min(found["train"]), max(found["train"])
    if recipe.data.score_range is not None:
        span, reason = Choice(tuple(recipe.data.score_range), "").value, "data.score_range in the recipe"
    elif low >= 0 and high <= 1:
        span, reason = (0.0, 1.0), "the training scores are between 0 and 1"
    else:
        span, reason = (min(0.0, low), high), "the training scores' own span; data.score_range names another"
    for split, values in found.items():
        for where, value in enumerate(values):
            if not span[0] <= value <= span[1]:
                number = rows[split].number(where)
                raise UserError(
                    f"{rows[split].where}: row {number} has the score {value:g}; allowed: {span[0]:g} to {span[1]:g}, "
                    + reason
                )
    return Choice((span[0], span[1]), f"{reason}; brought to 0 to 1")


def _number(rows: Rows, place: int, raw: Any) -> float:
    value = labels.number(raw)
    if not math.isfinite(value):
        raise UserError(
            f"{rows.where}: row {rows.number(place)} has the score {brief(repr(raw))}; allowed: a number in every row"
        )
    return value
