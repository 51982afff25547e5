"""Text classification: one text or a pair of texts to a class, to several labels, or to a number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import label_sets, labels, synthetic
from hf_mps.finetune.data.label_sets import LabelSets
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.models import classification, multi_label
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths, tokens
from hf_mps.metrics.sets import SetMetrics, of_sets

if TYPE_CHECKING:
    from datasets import Dataset

AUTO_CLASS = "AutoModelForSequenceClassification"
TRUTH = ("label",)


class Columns(schema.Columns):
    """The columns of the data by their roles; `text_pair` only where there is a second text.

    `label` is one column, or several of 0 and 1, one for each label that a row may have.
    """

    text: str = "text"
    text_pair: str | None = None
    label: str | list[str] = "label"

    def roles(self) -> dict[str, str]:
        """The column of each role; labels in columns of their own are `label_0`, `label_1`, …"""
        named = {"text": self.text, "text_pair": self.text_pair, "label": self.label}
        one = {role: column for role, column in named.items() if isinstance(column, str) and column}
        return one | {f"{label_sets.COLUMN}{number}": name for number, name in enumerate(self.columns_of_labels)}

    @property
    def columns_of_labels(self) -> list[str]:
        """The columns of 0 and 1; empty where one column holds the labels."""
        return [] if isinstance(self.label, str) else self.label

    @model_validator(mode="after")
    def _two_at_least(self) -> Columns:
        if len(self.columns_of_labels) == 1:
            raise ValueError("names one column of 0 and 1 in a list; give its name alone, or two columns or more")
        return self


class Data(schema.Labelled):
    """Adds the columns, `labels`: the class names in the order of their ids, and `separator` between the labels of a
    text.
    """

    STREAMS = True

    columns: Columns = Columns()
    separator: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _named_once(self) -> Data:
        for key in ("labels", "separator"):
            if self.columns.columns_of_labels and getattr(self, key):
                raise ValueError(f"has {key} beside labels in columns of their own; leave {key} out")
        return self


class Recipe(lengths.Padded):
    """Adds transformers' `problem_type`, and `config_overrides` for the model's configuration.

    Where rows have several labels, one is answered from the probability `threshold` on (0.5).
    """

    task: Literal["text-classification"]
    data: Data
    problem_type: labels.ProblemType | None = None
    threshold: float | None = Field(default=None, gt=0, lt=1)
    config_overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_names_of_numbers(self) -> Recipe:
        if self.problem_type == "regression" and self.data.labels:
            raise ValueError("has data.labels beside problem_type: regression; leave one of them out")
        if self.problem_type not in (None, label_sets.PROBLEM):
            for key, said in (("data.separator", self.data.separator), ("threshold", self.threshold)):
                if said or self.data.columns.columns_of_labels:
                    what = key if said else "labels in columns of their own"
                    raise ValueError(f"has {what} beside problem_type: {self.problem_type}; leave one of them out")
        return self


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return sentences made of their class's words; with a second text, the label is their relation."""
    draw, named = random.Random(recipe.seed), recipe.data.columns
    columns = named.columns_of_labels
    names = columns or recipe.data.labels
    kinds = len(names) if names else 2
    several = recipe.problem_type == label_sets.PROBLEM or columns or recipe.data.separator

    def row(kind: int) -> dict[str, Any]:
        first = draw.randrange(kinds) if named.text_pair else kind
        made: dict[str, Any] = {named.text: synthetic.sentence(draw, first)}
        if named.text_pair:
            made[named.text_pair] = synthetic.sentence(draw, (first + kind) % kinds)
        if several:
            both = sorted({kind, draw.randrange(kinds)})
            made[named.text] = " and ".join(synthetic.sentence(draw, one) for one in both)
            return made | _given(recipe, [synthetic.class_value(names, one) for one in both])
        label = 2.5 * kind if recipe.problem_type == "regression" else synthetic.class_value(names, kind)
        return made | {str(named.label): label}

    rows = synthetic.splits_of(recipe.data)
    return {split: [row(kind) for kind in synthetic.classes(count, kinds, draw)] for split, count in rows.items()}


def _given(recipe: Recipe, several: Sequence[Any]) -> dict[str, Any]:
    """Return the columns that hold a row's labels, as the recipe has them."""
    if columns := recipe.data.columns.columns_of_labels:
        return {column: int(column in several) for column in columns}
    separator = recipe.data.separator
    return {str(recipe.data.columns.label): separator.join(map(str, several)) if separator else list(several)}


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of every split.

    Raises UserError for labels, lengths, a configuration or a checkpoint that cannot be used.
    """
    import transformers

    others = [rows[split] for split in rows if split != "train"]
    classes = _labels(recipe, rows["train"], others)
    classification.refuse_smoothing(recipe.training, classes.problem_type)
    least = multi_label.threshold(recipe.threshold)
    measured = _measures(recipe, classes)
    tokenizer = checkpoint.tokenizer()
    config = labels.configure(checkpoint.config(), classes.names, recipe.config_overrides)
    config.problem_type = classes.problem_type
    longest = lengths.limit(recipe, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    content = tokens.digest(tokenizer)
    features = {split: _tokenised(rows[split], tokenizer, content, longest, classes) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    length = lengths.decide(recipe, counts["train"], longest, others=itertools.chain(*counts.values()))
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    return Prepared(
        splits=features | {"train": _streamed(rows["train"], features["train"], tokenizer, longest, classes)},
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(transformers.DataCollatorWithPadding(tokenizer), tokenizer),
        metrics=measured,
        compute_metrics=lambda evaluated: measured.compute(
            _answers(evaluated, classes, least.value), evaluated.label_ids
        ),
        baseline=_baseline(measured, features, classes),
        auto_class=AUTO_CLASS,
        pipeline_tag="text-classification",
        choices={"lengths": length, **_described(classes, rows["train"], least), **lent, "model": weights},
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
        token_counts=counts["train"],
        predict=lambda trainer: _predicted(
            rows["validation"], trainer.predict(features["validation"]), classes, least.value
        ),
        figures=lambda predicted: _figures(predicted, classes),
        snippet=multi_label.SNIPPET.format(threshold=least.value) if isinstance(classes, LabelSets) else None,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved classifier answers. Raises UserError for a checkpoint that cannot be used."""
    import transformers

    tokenizer, config = checkpoint.tokenizer(), checkpoint.config()
    classes, content = label_sets.kept(config) or labels.kept(config), tokens.digest(tokenizer)
    least = multi_label.threshold(recipe.threshold, chosen)
    length = lengths.kept(recipe, chosen, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows, every: bool = False) -> list[dict[str, Any]]:
        features = _tokenised(rows, tokenizer, content, length.value.longest, None)
        return _predicted(rows, trainer.predict(features), classes, least.value, every)

    return Answering(
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(transformers.DataCollatorWithPadding(tokenizer), tokenizer),
        answers=answers,
        every=partial(answers, every=True) if classes.names else None,
        choices={"model": weights, "lengths": length, **_described(classes, None, least), **lent},
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
    )


def _labels(recipe: Recipe, train: Rows, others: Sequence[Rows]) -> labels.Labels:
    """Return what the labels mean: a class or a number a row, or several labels."""
    data = recipe.data
    if label_sets.asked(train, data.separator, recipe.problem_type):
        return label_sets.decide(
            train,
            others,
            named_in_recipe=data.labels,
            columns=data.columns.columns_of_labels,
            separator=data.separator,
        )
    if recipe.threshold is not None:
        raise UserError("threshold is for rows with several labels, and these have one each; leave it out")
    return labels.decide(train, others, data.labels, recipe.problem_type)


def _described(found: labels.Labels, train: Rows | None, least: Choice[float]) -> dict[str, Choice[Any]]:
    if isinstance(found, LabelSets):
        return {**label_sets.described(found, train), "threshold": least}
    return dict(labels.choices(found))


def _measures(recipe: Recipe, found: labels.Labels) -> metrics.Metrics | SetMetrics:
    if isinstance(found, LabelSets):
        return of_sets(recipe.metrics, recipe.task)
    return metrics.of_labels(recipe.metrics or _metrics(found), recipe.task, len(found.names))


def _metrics(found: labels.Labels) -> list[str]:
    """Return what is measured where the recipe does not say."""
    if not found.names:
        return ["pearsonr", "spearmanr"]
    return ["accuracy", "f1" if len(found.names) == 2 else "f1/macro"]


def _baseline(
    measured: metrics.Metrics | SetMetrics, features: dict[str, Dataset], found: labels.Labels
) -> metrics.Baseline:
    truths, seen = features["validation"]["labels"][:], features["train"]["labels"][:]
    if isinstance(measured, SetMetrics):
        return measured.baseline(truths, train=seen, names=found.names)
    return measured.baseline(truths, train=seen, regression=not found.names, names=found.names)


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, classes: labels.Labels | None) -> Dataset:
    """Return the features of one split; without `classes` those of rows without a label."""
    from datasets import ClassLabel, Features, List, Value

    roles = _texts(rows)
    tokens.refuse_other_than_text(rows, roles)
    inputs = tokenizer("a", "b" if len(roles) == 2 else None)

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        texts = [tokens.texts(rows, role, batch, indices) for role in roles]
        return _encoded(tokenizer, longest, classes, texts, classes.raw(batch) if classes is not None else ())

    # Features said outright, and a new column for the ids: a `map` that overwrites a text column with integers casts
    # them back to text, and Metal refuses the float64 that a plain Python float would become on the way.
    label: dict[str, Any] = {}
    if isinstance(classes, LabelSets):
        label = {"labels": List(Value("float32"))}
    elif classes is not None:
        label = {"labels": ClassLabel(names=list(classes.names)) if classes.names else Value("float32")}
    return tokens.map_cached(
        rows,
        encode,
        content=content,
        key=("text-classification", longest, roles, classes),
        features=Features({**{name: List(Value("int32")) for name in inputs}, **label}),
    )


def _encoded(
    tokenizer: Any, longest: int, classes: labels.Labels | None, texts: Sequence[list[str]], raw_labels: Sequence[Any]
) -> dict[str, Any]:
    encoded = tokenizer(*texts, truncation=True, max_length=longest)
    return {**encoded, **({"labels": [classes.encode(raw) for raw in raw_labels]} if classes else {})}


def _streamed(rows: Rows, sample: Dataset, tokenizer: Any, longest: int, classes: labels.Labels) -> Any:
    """Return the features to train on: `sample`, or the stream of all rows where they have one."""
    from hf_mps.finetune.stream.batches import Making
    from hf_mps.finetune.stream.dataset import by_rows, train

    roles = _texts(rows)

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        if wrong := [raw for raw in classes.raw(batch) if not classes.known(raw)]:
            raise UserError(
                f"its label is {brief(str(wrong[0]))}, which no row of the first ones has; next: data.labels"
            )
        return _encoded(tokenizer, longest, classes, [batch[role] for role in roles], classes.raw(batch))

    return train(sample, rows, Making(by_rows(encode), longest))


def _texts(rows: Rows) -> list[str]:
    return [role for role in ("text", "text_pair") if role in rows.dataset.column_names]


def _answers(evaluated: Any, found: labels.Labels, least: float) -> Any:
    """Return class ids, or numbers for regression, shape (rows,), from logits of shape (rows, classes).

    Several labels a row come as a table of that shape.
    """
    logits = classification.logits_of(evaluated.predictions)
    if isinstance(found, LabelSets):
        return multi_label.answers(logits, least)
    return logits.argmax(axis=-1) if found.names else logits.squeeze(-1)


def _predicted(
    rows: Rows, evaluated: Any, found: labels.Labels, least: float, every: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv, without the truth where the rows have none; `every` as `multi_label.rows`."""
    inputs = list(rows.dataset.select_columns(_texts(rows)))
    logits = classification.logits_of(evaluated.predictions)
    if isinstance(found, LabelSets):
        return multi_label.rows(inputs, evaluated.label_ids, logits, found, least, every=every)
    if found.names:
        return classification.rows(inputs, evaluated.label_ids, logits, found.names, every=every)
    truths = evaluated.label_ids
    known = [{}] * len(inputs) if truths is None else [{"label": float(truth)} for truth in truths]
    numbers = zip(inputs, known, logits.squeeze(-1), strict=True)
    return [{**given, **truth, "prediction": float(answer)} for given, truth, answer in numbers]


def _figures(predicted: Sequence[Mapping[str, Any]], found: labels.Labels) -> Mapping[str, bytes]:
    from hf_mps.finetune.report import classes

    pairs = [(row["label"], row["prediction"]) for row in predicted]
    if isinstance(found, LabelSets):
        return classes.by_label(pairs, found.names)
    return classes.confusion(pairs, found.names) if found.names else classes.scatter(*zip(*pairs, strict=True))
