"""Multiple choice: which of a few continuations or answers fits a context (SWAG, HellaSwag, one's own questions)."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, load, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import classification
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths, tokens

if TYPE_CHECKING:
    from datasets import Dataset

AUTO_CLASS = "AutoModelForMultipleChoice"
TRUTH = ("label",)


class Columns(schema.Columns):
    """The columns of the data by their roles.

    `choices` is one column of lists, or a column for each choice. `start` is the beginning that all choices of a row
    share, where the data keeps it apart (SWAG). `label` is the right choice's number from 0, or its letter from A.
    """

    context: str = "context"
    start: str | None = None
    choices: str | list[str] = "choices"
    label: str = "label"

    def roles(self) -> dict[str, str]:
        """The column of each role that the task reads; choices in columns of their own are `choice_0`, `choice_1`, …"""
        if isinstance(self.choices, str):
            choices = {"choices": self.choices}
        else:
            choices = {f"choice_{number}": column for number, column in enumerate(self.choices)}
        before = {"context": self.context, **({"start": self.start} if self.start else {})}
        return {**before, **choices, "label": self.label}

    @model_validator(mode="after")
    def _two_at_least(self) -> Columns:
        if not isinstance(self.choices, str) and len(self.choices) < 2:
            raise ValueError("names fewer than two choices; give a column for each, or one column of lists")
        return self


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(lengths.Padded):
    """Adds `config_overrides` for the model's configuration."""

    task: Literal["multiple-choice"]
    data: Data
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return contexts, each with one choice made of its class's words."""
    draw, named = random.Random(recipe.seed), recipe.data.columns
    count = 4 if isinstance(named.choices, str) else len(named.choices)

    def row(right: int) -> dict[str, Any]:
        kind = draw.randrange(4)
        others = [other for other in range(4) if other != kind]
        texts = [synthetic.word(draw, kind if place == right else draw.choice(others)) for place in range(count)]
        made: dict[str, Any] = {named.context: synthetic.sentence(draw, kind), named.label: right}
        if named.start:
            made[named.start] = draw.choice(synthetic.SUBJECTS)
        if isinstance(named.choices, str):
            return made | {named.choices: texts}
        return made | dict(zip(named.choices, texts, strict=True))

    rows = synthetic.splits_of(recipe.data)
    return {split: [row(right) for right in synthetic.classes(number, count, draw)] for split, number in rows.items()}


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of every split.

    Raises UserError for choices, labels, lengths or a checkpoint that cannot be used.
    """
    import transformers

    count = _count(rows["train"])
    for split in rows.values():
        _refuse_misfits(split, count)
    names = [str(number) for number in range(count)]
    measured = metrics.of_labels(recipe.metrics or ["accuracy"], recipe.task, count)
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    labels.override(config, recipe.config_overrides)
    longest = lengths.limit(recipe, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    content = tokens.digest(tokenizer)
    features = {split: _tokenised(rows[split], tokenizer, content, longest) for split in rows}
    counts = {split: _longest(features[split]) for split in features}
    length = lengths.decide(recipe, counts["train"], longest, others=itertools.chain(*counts.values()))
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    truths = {split: features[split]["labels"] for split in load.SPLITS}
    collator = transformers.data.data_collator.DataCollatorForMultipleChoice(tokenizer)
    return Prepared(
        splits=features,
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(collator, tokenizer),
        metrics=measured,
        compute_metrics=lambda evaluated: measured.compute(
            classification.logits_of(evaluated.predictions).argmax(axis=-1), evaluated.label_ids
        ),
        baseline=measured.baseline(truths["validation"], train=truths["train"]),
        auto_class=AUTO_CLASS,
        pipeline_tag="multiple-choice",
        choices={
            "lengths": length,
            "choices": Choice(count, f"in every row of {rows['train'].where}"),
            **lent,
            "model": weights,
        },
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
        token_counts=counts["train"],
        predict=lambda trainer: _predicted(rows["validation"], trainer.predict(features["validation"]), names),
        figures=lambda predicted: _figures(predicted, names),
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model chooses. Raises UserError for a checkpoint that cannot be used."""
    import transformers

    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    content = tokens.digest(tokenizer)
    length = lengths.kept(recipe, chosen, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    collator = transformers.data.data_collator.DataCollatorForMultipleChoice(tokenizer)

    def answers(trainer: Any, rows: Rows, every: bool = False) -> list[dict[str, Any]]:
        count = _count(rows)
        _refuse_misfits(rows, count)
        features = _tokenised(rows, tokenizer, content, length.value.longest)
        return _predicted(rows, trainer.predict(features), list(map(str, range(count))), every)

    return Answering(
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(collator, tokenizer),
        answers=answers,
        every=partial(answers, every=True),
        choices={"model": weights, "lengths": length, **lent},
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
    )


def _roles(rows: Rows) -> list[str]:
    """The roles of the choices, in their order."""
    return [role for role in rows.dataset.column_names if role.startswith("choice")]


def _choices(rows: Rows) -> list[list[Any]]:
    """Return each row's choices."""
    table = rows.dataset.select_columns(_roles(rows))[:]
    columns = list(table.values())
    return columns[0] if "choices" in table else [list(row) for row in zip(*columns, strict=True)]


def _count(rows: Rows) -> int:
    """Return the number of choices of the first row. Raises UserError for columns of another kind."""
    texts = [role for role in rows.dataset.column_names if role in ("context", "start") or role.startswith("choice_")]
    tokens.refuse_other_than_text(rows, texts)
    if "choices" not in rows.dataset.column_names:
        return len(_roles(rows))
    kind = rows.dataset.features["choices"]
    if getattr(getattr(kind, "feature", None), "dtype", None) not in tokens.TEXT:
        came = getattr(kind, "dtype", None) or type(kind).__name__
        raise UserError(
            f"{rows.where}: data.columns.choices names a column of type {came}; allowed: a list of texts in each row,"
            " or a list of columns (data.columns.choices=[ending0, ending1])"
        )
    return len(rows.dataset[0]["choices"] or ())


def _refuse_misfits(rows: Rows, count: int) -> None:
    """Raise UserError for the first row with another number of choices, without a text, or with an unusable label."""
    known = rows.dataset["label"] if "label" in rows.dataset.column_names else [0] * len(rows.dataset)
    for index, (choices, raw) in enumerate(zip(_choices(rows), known, strict=True)):
        where = f"{rows.where}: row {rows.number(index)}"
        if choices is None or len(choices) != count or count < 2:
            raise UserError(f"{where} has {len(choices or ())} choices; allowed: {max(count, 2)}, as many in every row")
        if None in choices:
            raise UserError(f"{where}: choice {choices.index(None)} has no text; allowed: a text for each choice")
        if raw == -1 or labels.key(raw) == "":
            raise UserError(f"{where} has no label; allowed: a label in every row")
        if not 0 <= _choice_number(raw) < count:
            letters = f"A to {string.ascii_uppercase[count - 1]}" if count <= 26 else "a letter"
            raise UserError(f"{where}: label '{raw}' is no choice of it; allowed: 0 to {count - 1}, or {letters}")


def _choice_number(raw: Any) -> int:
    """Return the number of the choice that a label names, -1 where it names none."""
    said = labels.key(raw)
    if said.isdecimal():
        return int(said)
    return string.ascii_uppercase.find(said.upper()) if len(said) == 1 else -1


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int) -> Dataset:
    """Return one split's features: each column a list for each choice, and the number of the right one.

    Where nobody knows it, it is 0: transformers' collator asks for one.
    """
    from datasets import Features, List, Value

    roles, starts = _roles(rows), "start" in rows.dataset.column_names

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        contexts = tokens.texts(rows, "context", batch, indices)
        begun = tokens.texts(rows, "start", batch, indices) if starts else [""] * len(contexts)
        listed = batch["choices"] if roles == ["choices"] else list(zip(*(batch[role] for role in roles), strict=True))
        first = [context for context, choices in zip(contexts, listed, strict=True) for _ in choices]
        second = [f"{start} {one}".strip() for start, row in zip(begun, listed, strict=True) for one in row]
        encoded = tokenizer(first, second, truncation=True, max_length=longest)
        size = len(listed[0])
        grouped = {name: [flat[at : at + size] for at in range(0, len(flat), size)] for name, flat in encoded.items()}
        return {**grouped, "labels": [_choice_number(raw) for raw in batch.get("label", [0] * len(listed))]}

    inputs = tokenizer("a", "b")
    return tokens.map_cached(
        rows,
        encode,
        content=content,
        key=("multiple-choice", longest, roles, starts),
        features=Features({**{name: List(List(Value("int32"))) for name in inputs}, "labels": Value("int64")}),
    )


def _longest(features: Dataset) -> list[int]:
    """Return the tokens of each row's longest choice, to which the row is padded."""
    return [max(map(len, row)) for row in features["input_ids"]]


def _predicted(rows: Rows, evaluated: Any, names: Sequence[str], every: bool = False) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv, without the truth where the rows have none; `every` as
    `classification.rows`.
    """
    truths = evaluated.label_ids if "label" in rows.dataset.column_names else None
    given = rows.dataset.select_columns([role for role in ("context", "start") if role in rows.dataset.column_names])
    inputs = [{**row, "choices": choices} for row, choices in zip(given, _choices(rows), strict=True)]
    return classification.rows(inputs, truths, classification.logits_of(evaluated.predictions), names, every=every)


def _figures(predicted: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, bytes]:
    from hf_mps.finetune.report import classes

    return classes.confusion([(row["label"], row["prediction"]) for row in predicted], names)
