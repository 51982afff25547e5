"""Sentence embeddings: texts become vectors whose cosine is their similarity, trained by sentence-transformers.

Pairs with a score learn the score; pairs without one learn that the second text is the batch's nearest to the first,
and that a third, the hard negative, is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import embeddings, in_batch
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.models.embeddings import ARGUMENTS, SETTLED
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths
from hf_mps.metrics.selection import choose

__all__ = ["ARGUMENTS", "OPTIONAL", "SETTLED", "TRUTH", "Recipe", "answer", "prepare", "smoke_rows"]

TRUTH = ("negative", "score")
OPTIONAL = ("text_pair",)
Loss = Literal["CosineSimilarityLoss", "CoSENTLoss", "MultipleNegativesRankingLoss"]
SCORED: tuple[Loss, ...] = ("CosineSimilarityLoss", "CoSENTLoss")
RANKED: tuple[Loss, ...] = ("MultipleNegativesRankingLoss",)
SNIPPET = """from sentence_transformers import SentenceTransformer
model = SentenceTransformer(".")
print(model.similarity(*model.encode(["one text", "another text"])))"""


class Columns(schema.Columns):
    """The columns of the data by their roles: `score` for pairs with a score, `negative` only without one."""

    text: str = "text"
    text_pair: str = "text_pair"
    negative: str | None = None
    score: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Columns:
        if self.negative and self.score:
            raise ValueError("has negative beside score; leave one of them out")
        return self


class Data(schema.Data):
    """Adds the columns, and `score_range`: the scores of no similarity and of identity."""

    columns: Columns = Columns()
    score_range: list[float] | None = Field(default=None, min_length=2, max_length=2)

    @model_validator(mode="after")
    def _rising(self) -> Data:
        if self.score_range is not None and self.score_range[0] >= self.score_range[1]:
            raise ValueError(f"has score_range {self.score_range}; allowed: [low, high]")
        return self


class Recipe(lengths.Padded):
    """Adds the loss, by its class name in sentence-transformers; it defaults to what suits the data."""

    task: Literal["sentence-embeddings"]
    data: Data
    loss: Loss | None = None

    @model_validator(mode="after")
    def _suits(self) -> Recipe:
        allowed = SCORED if self.data.columns.score else RANKED
        if self.loss is not None and self.loss not in allowed:
            said = "with" if self.data.columns.score else "without"
            raise ValueError(f"has loss {self.loss}, and the pairs are {said} a score; allowed: {', '.join(allowed)}")
        return self


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make rows, model, loss and metrics from the rows of both splits.

    Raises UserError for scores, lengths or a checkpoint that cannot be used, and without sentence-transformers.
    """
    library = embeddings.library()
    scored = recipe.data.columns.score is not None
    measured = metrics.load(choose(recipe.metrics, ["sts" if scored else "retrieval"], recipe.task).names)
    model, weights = embeddings.load(checkpoint, device)
    longest = lengths.limit(recipe, model.tokenizer, checkpoint.config())
    model.max_seq_length = longest
    span = _span(recipe, rows) if scored else Choice((0.0, 1.0), "")
    roles = [role for role in recipe.data.columns.roles() if role != "score"]
    encoded = {split: embeddings.encoded(rows[split], model.tokenizer, longest, roles, span.value) for split in rows}
    counts = {split: encoded[split]["lengths"][:] for split in encoded}
    flat = {split: list(itertools.chain(*counts[split])) for split in counts}
    length = lengths.decide(recipe, flat["train"], longest, others=itertools.chain(*flat.values()), grouped=False)
    loss_name = recipe.loss or (SCORED if scored else RANKED)[0]
    choices: dict[str, Choice[Any]] = {
        "lengths": length,
        "loss": Choice(loss_name, "loss in the recipe" if recipe.loss else _why(scored)),
        **({"scores": Choice(f"{span.value[0]:g} to {span.value[1]:g}", span.reason)} if scored else {}),
        "sampling": embeddings.sampling(recipe, scored=scored),
        "model": weights,
    }
    columns = [*(embeddings.NAMES[role] for role in roles), *(["score"] if scored else [])]
    data = {split: encoded[split].select_columns(columns) for split in SPLITS}
    collator = embeddings.collator(model, length.value, recipe.training.get("prompts"))
    evaluator = embeddings.EmbeddingEvaluator(rows["validation"], data["validation"], measured, collator)
    return Prepared(
        splits=data,
        model=model,
        processing_class=model.tokenizer,
        collator=collator,
        metrics=measured,
        compute_metrics=None,
        baseline=evaluator.baseline(),
        auto_class="SentenceTransformer",
        library="sentence-transformers",
        pipeline_tag="sentence-similarity",
        choices=choices,
        trainer=embeddings.trainer(evaluator),
        arguments=library.SentenceTransformerTrainingArguments,
        arguments_defaults=in_batch.arguments(ranked=not scored),
        trainer_settings={"loss": in_batch.make(library.sentence_transformer.losses, loss_name, model)},
        token_counts=[max(row) for row in counts["train"]],
        predict=lambda trainer: evaluator.rows(trainer.model),
        figures=pictures.similarities if scored else pictures.ranks,
        snippet=SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model compares pairs of texts, and embeds texts alone.

    Raises UserError for a checkpoint that cannot be used, and without sentence-transformers.
    """
    embeddings.library()
    return embeddings.answering(recipe, checkpoint, chosen, embeddings.load(checkpoint, device), _answers)


def smoke_rows(recipe: Recipe, folder: Any) -> dict[str, list[dict[str, Any]]]:
    """Return pairs of short generated texts about one thing, with a score or a negative where the recipe has them."""
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


def _answers(trainer: Any, collator: Any, texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yield the cosine of each pair of texts, or the embedding of each text alone."""
    size = trainer.args.eval_batch_size
    found = [
        embeddings.embedded(trainer.model, collator, some, embeddings.NAMES[role], size) for role, some in texts.items()
    ]
    for number, cosine in enumerate((found[0] * found[-1]).sum(axis=1).tolist()):
        line = {role: some[number] for role, some in texts.items()}
        yield line | ({"embedding": found[0][number]} if len(texts) == 1 else {"cosine": round(cosine, 4)})


def _why(scored: bool) -> str:
    if scored:
        return "the pairs have a score, which the cosine is to equal"
    return "the other pairs of a batch are what a text is not about: a larger batch is a harder lesson"


def _span(recipe: Recipe, rows: Mapping[str, Rows]) -> Choice[tuple[float, float]]:
    """Return the lowest and highest score. Raises UserError, naming the row, for a score outside of them or not
    finite.
    """
    found = {split: [_number(rows[split], where, raw) for where, raw in _scores(rows[split])] for split in rows}
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


def _scores(rows: Rows) -> Sequence[tuple[int, Any]]:
    return list(enumerate(rows.dataset["score"]))


def _number(rows: Rows, place: int, raw: Any) -> float:
    try:
        value = float(raw)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(
            f"{rows.where}: row {rows.number(place)} has the score {brief(repr(raw))}; allowed: a number in every row"
        )
    return value
