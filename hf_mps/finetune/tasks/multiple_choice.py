"""Multiple choice: which of a few continuations or answers fits a context (SWAG, HellaSwag, one's own questions)."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, load, synthetic
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures, predictions
from hf_mps.finetune.tasks import Dataset, Prepared
from hf_mps.finetune.tasks._text import TextTask
from hf_mps.finetune.text import lengths, tokens


class Columns(schema.Columns):
    """The columns of the data by their roles.

    `choices` is one column of lists, or a column for each choice. `start` is the beginning that all choices of a row
    share, where the data keeps it apart (SWAG). `label` is the right choice's number from 0, or its letter from A.
    """

    context: str = "context"
    """The column of the text that the question or choice is about."""
    start: str | None = None
    """The column of the words that begin every choice of a row."""
    choices: str | list[str] = "choices"
    """The column of lists of choices, or a list of columns."""
    label: str = "label"
    """The column of the label."""

    def wrong(self) -> Iterator[str]:
        if not isinstance(self.choices, str) and len(self.choices) < 2:
            yield "names fewer than two choices; give a column for each, or one column of lists"


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Recipe(labels.Overridden, lengths.Padded):
    """Adds `config_overrides`."""

    data: Data


class MultipleChoice(TextTask[Recipe]):
    """Learns which of a few continuations or answers fits a context."""

    truth = ("label",)
    architectures = ("ForMultipleChoice",)
    shape = "choices"
    keep = staticmethod(predictions.keep_logits)
    collator_class = "DataCollatorForMultipleChoice"
    has_probabilities = True

    def prepare(self, rows: dict[str, load.Rows]) -> Prepared:
        recipe, count = self.recipe, _count(rows["train"])
        for split in rows.values():
            _refuse_misfits(split, count)
        measured = metrics.of_labels(recipe.metrics or ["accuracy"], recipe.task, count)
        self.choices["choices"] = Choice(count, f"in every row of {rows['train'].where}")
        config = self.checkpoint.config()
        labels.override(config, recipe.config_overrides)
        self.begin(config)
        features, counts = self.encoded(rows)
        self.finish()
        truths = {split: features[split]["labels"] for split in load.SPLITS}
        return self.made(
            splits=features,
            metrics=measured,
            compute_metrics=lambda evaluated: measured.compute(
                predictions.logits_of(evaluated.predictions).argmax(axis=-1), evaluated.label_ids
            ),
            baseline=lambda: measured.baseline(truths["validation"], train=truths["train"]),
            token_counts=counts,
            predicted=(rows["validation"], features["validation"]),
            figures=lambda predicted: pictures.confusion(predicted, [str(number) for number in range(count)]),
        )

    def counts(self, features: Any) -> list[int]:
        """Return the tokens of each row's longest choice, to which the row is padded."""
        return [max(map(len, row)) for row in features["input_ids"]]

    def inputs(self, rows: load.Rows) -> Dataset:
        _refuse_misfits(rows, _count(rows))
        return _tokenised(rows, self.tokenizer, self.content, self.longest)

    def answers(self, trainer: Any, rows: load.Rows, inputs: Any, every: bool = False) -> list[dict[str, Any]]:
        evaluated, there = trainer.predict(inputs), rows.dataset.column_names
        truths = evaluated.label_ids if "label" in there else None  # rows without a label carry 0 (`_tokenised`)
        given = rows.dataset.select_columns([role for role in ("context", "start") if role in there])
        rows_ = [{**row, "choices": choices} for row, choices in zip(given, _choices(rows), strict=True)]
        names = [str(number) for number in range(_count(rows))]
        return predictions.rows(rows_, truths, predictions.logits_of(evaluated.predictions), names, every=every)

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a context with one choice made of its class's words."""
        draw, named = made.draw, recipe.data.columns
        count = 4 if isinstance(named.choices, str) else len(named.choices)
        right, kind = made.kind(count), draw.randrange(4)
        others = [other for other in range(4) if other != kind]
        texts = [synthetic.word(draw, kind if place == right else draw.choice(others)) for place in range(count)]
        row: dict[str, Any] = {"context": synthetic.sentence(draw, kind), "label": right, "choices": texts}
        if named.start:
            row["start"] = draw.choice(synthetic.SUBJECTS)
        return row | {f"choice_{number}": text for number, text in enumerate(texts)}


def _roles(rows: load.Rows) -> list[str]:
    """The roles of the choices, in their order."""
    return [role for role in rows.dataset.column_names if role.startswith("choice")]


def _choices(rows: load.Rows) -> list[list[Any]]:
    """Return each row's choices."""
    table = rows.dataset.select_columns(_roles(rows))[:]
    columns = list(table.values())
    return columns[0] if "choices" in table else [list(row) for row in zip(*columns, strict=True)]


def _count(rows: load.Rows) -> int:
    """Return the number of choices of the first row. Raises UserError for columns of another kind."""
    texts = [role for role in rows.dataset.column_names if role in ("context", "start") or role.startswith("choice_")]
    tokens.refuse_other_than_text(rows, texts)
    if "choices" not in rows.dataset.column_names:
        return len(_roles(rows))
    kind = rows.dataset.features["choices"]
    if getattr(getattr(kind, "feature", None), "dtype", None) not in tokens.TEXT:
        came = getattr(kind, "dtype", None) or type(kind).__name__
        allowed = "a list of texts in each row, or a list of columns (data.columns.choices=[ending0, ending1])"
        raise UserError(f"{rows.where}: data.columns.choices names a column of type {came}; allowed: {allowed}")
    return len(rows.dataset[0]["choices"] or ())


def _refuse_misfits(rows: load.Rows, count: int) -> None:
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
    # `find` answers -1 for what is no letter.
    return string.ascii_uppercase.find(said.upper()) if len(said) == 1 else -1


def _tokenised(rows: load.Rows, tokenizer: Any, content: str, longest: int) -> Dataset:
    """Return one split's features: each column a list for each choice, and the number of the right one."""

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
        # Where nobody knows the right choice it is 0: transformers' collator asks for one.
        return {**grouped, "labels": [_choice_number(raw) for raw in batch.get("label", [0] * len(listed))]}

    kinds = {**dict.fromkeys(tokenizer("a", "b"), (("int32",),)), "labels": "int64"}
    key = ("multiple-choice", longest, roles, starts)
    return tokens.map_cached(rows, encode, content=content, key=key, features=kinds)
