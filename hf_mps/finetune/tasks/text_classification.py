"""Text classification: one text or a pair of texts to a class, to several labels, or to a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.errors import UserError, brief
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures, predictions
from hf_mps.finetune.tasks import Dataset, Prepared, snippets
from hf_mps.finetune.tasks._text import TextTask
from hf_mps.finetune.text import lengths, tokens
from hf_mps.metrics.selection import of_sets


class Columns(schema.Columns):
    """The columns of the data by their roles; `text_pair` only where there is a second text.

    `label` is one column, or several of 0 and 1, one for each label that a row may have.
    """

    text: str = "text"
    """The column of the text."""
    text_pair: str | None = None
    """The column of the second text."""
    label: str | list[str] = "label"
    """The column of the label."""

    @property
    def columns_of_labels(self) -> list[str]:
        """The columns of 0 and 1; empty where one column holds the labels."""
        return [] if isinstance(self.label, str) else self.label

    def wrong(self) -> Iterator[str]:
        if len(self.columns_of_labels) == 1:
            yield "names one column of 0 and 1 in a list; give its name alone, or two columns or more"


class Data(schema.Labelled):
    """Adds the columns, `labels`: the class names in the order of their ids, and `separator` between the labels of a
    text.
    """

    STREAMS = True

    columns: Columns = Columns()
    separator: str | None = Field(default=None, min_length=1)
    """What separates the labels of a row in one text."""

    def wrong(self) -> Iterator[str]:
        for key in ("labels", "separator"):
            if self.columns.columns_of_labels and getattr(self, key):
                yield f"has {key} beside labels in columns of their own; leave {key} out"


class Recipe(labels.Overridden, lengths.Padded):
    """Adds transformers' `problem_type`, and `config_overrides`.

    Where rows have several labels, one is answered from the probability `threshold` on (0.5).
    """

    data: Data
    problem_type: labels.ProblemType | None = None
    """One class a row, several labels, or a number; by default what the labels look like."""
    threshold: float | None = Field(default=None, gt=0, lt=1)
    """The least probability of an answer."""

    def wrong(self) -> Iterator[str]:
        if self.problem_type == "regression" and self.data.labels:
            yield "has data.labels beside problem_type: regression; leave one of them out"
        if self.problem_type not in (None, labels.MULTI_LABEL):
            for key, said in (("data.separator", self.data.separator), ("threshold", self.threshold)):
                if said or self.data.columns.columns_of_labels:
                    what = key if said else "labels in columns of their own"
                    yield f"has {what} beside problem_type: {self.problem_type}; leave one of them out"


class TextClassification(TextTask[Recipe]):
    """Learns the class, the labels or the number of a text or a pair of texts."""

    truth = ("label",)
    architectures = ("ForSequenceClassification",)
    shape = "encoder"
    keep = staticmethod(predictions.keep_logits)

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, train = self.recipe, rows["train"]
        classes = self.classes = self._labels(train, [some for split, some in rows.items() if split != "train"])
        if recipe.training.get("label_smoothing_factor") and classes.problem_type != "single_label_classification":
            kind = "several labels" if classes.names else "numbers"
            told = f"training.label_smoothing_factor is for one class a row, and these have {kind}; leave it out"
            raise UserError(told)
        self.least = predictions.threshold(recipe.threshold)
        if recipe.data.columns.text_pair:
            self.snippet = snippets()[f"{self.name} pair"]
        self.choices |= labels.choices(classes, train)
        measured: metrics.Metrics
        if isinstance(classes, labels.LabelSets):
            measured = of_sets(recipe.metrics, recipe.task)
            self.choices["threshold"] = self.least
            self.snippet = snippets()[f"{self.name} sets"].format(threshold=self.least.value)
        else:
            usual = ["accuracy", "f1" if len(classes.names) == 2 else "f1/macro"]
            usual = usual if classes.names else ["pearsonr", "spearmanr", "mae", "rmse"]
            measured = metrics.of_labels(recipe.metrics or usual, recipe.task, len(classes.names))
        config = labels.configure(self.checkpoint.config(), classes.names, recipe.config_overrides)
        # Given here: transformers would guess it from the labels' dtype in the first batch.
        config.problem_type = classes.problem_type
        self.begin(config)
        features, counts = self.encoded(rows)
        self.finish()
        truths, seen = features["validation"]["labels"][:], features["train"]["labels"][:]
        return self.made(
            splits=features | {"train": self._streamed(train, features["train"])},
            metrics=measured,
            compute_metrics=lambda evaluated: measured.compute(
                self._decided(predictions.logits_of(evaluated.predictions)), evaluated.label_ids
            ),
            baseline=lambda: measured.baseline(truths, train=seen, names=classes.names, regression=not classes.names),
            token_counts=counts,
            predicted=(rows["validation"], features["validation"]),
            figures=self._figures,
        )

    def recall(self, config: Any, chosen: Mapping[str, Any]) -> None:
        self.classes = labels.kept(config)
        self.has_probabilities = bool(self.classes.names)
        self.least = predictions.threshold(self.recipe.threshold, chosen)

    def inputs(self, rows: Rows) -> Dataset:
        known = any(role.startswith("label") for role in rows.dataset.column_names)
        return _tokenised(rows, self.tokenizer, self.content, self.longest, self.classes if known else None)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> list[dict[str, Any]]:
        evaluated, classes = trainer.predict(inputs), self.classes
        given = list(rows.dataset.select_columns(_texts(rows)))
        logits, truths = predictions.logits_of(evaluated.predictions), evaluated.label_ids
        if classes.names:
            least = self.least.value if isinstance(classes, labels.LabelSets) else None
            return predictions.rows(given, truths, logits, classes.names, least=least, every=every)
        known = [{}] * len(given) if truths is None else [{"label": float(truth)} for truth in truths]
        numbers = zip(given, known, logits.squeeze(-1), strict=True)
        return [{**row, **truth, "prediction": float(answer)} for row, truth, answer in numbers]

    def _labels(self, train: Rows, others: Sequence[Rows]) -> labels.Labels:
        """Return what the labels mean: a class or a number a row, or several labels."""
        recipe, data = self.recipe, self.recipe.data
        if labels.has_sets(train, data.separator, recipe.problem_type):
            return labels.decide_sets(train, others, data.labels, data.columns.columns_of_labels, data.separator)
        if recipe.threshold is not None:
            raise UserError("threshold is for rows with several labels, and these have one each; leave it out")
        return labels.decide(train, others, data.labels, recipe.problem_type)

    def _decided(self, logits: Any) -> Any:
        """Return class ids, or numbers for regression, shape (rows,), from logits of shape (rows, classes).

        Several labels a row come as a table of that shape.
        """
        if isinstance(self.classes, labels.LabelSets):
            return predictions.sigmoids(logits) >= self.least.value
        return logits.argmax(axis=-1) if self.classes.names else logits.squeeze(-1)

    def _streamed(self, rows: Rows, sample: Dataset) -> Any:
        """Return the features to train on: `sample`, or the stream of all rows where they have one."""
        if rows.stream is None:
            return sample
        from hf_mps.finetune.stream import batches, loader  # which import modules that only streams need

        roles, classes, tokenizer, longest = _texts(rows), self.classes, self.tokenizer, self.longest

        def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
            if wrong := [raw for raw in classes.raw(batch) if not classes.known(raw)]:
                told = f"its label is {brief(str(wrong[0]))}, which no row of the first ones has"
                raise UserError(f"{told}; next: data.labels")
            return _encoded(tokenizer, longest, classes, [batch[role] for role in roles], classes.raw(batch))

        return loader.train(rows, sample, batches.Making(batches.by_rows(encode), longest))

    def _figures(self, predicted: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
        names = self.classes.names
        if isinstance(self.classes, labels.LabelSets):
            return pictures.by_label(predicted, names)
        return pictures.confusion(predicted, names) if names else pictures.scatter(predicted)

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a sentence made of its class's words; with a second text, the label is their relation."""
        draw, named, separator = made.draw, recipe.data.columns, recipe.data.separator
        columns = named.columns_of_labels
        names = columns or recipe.data.labels
        kinds = len(names) if names else 2
        kind = made.kind(kinds)
        first = draw.randrange(kinds) if named.text_pair else kind
        row: dict[str, Any] = {"text": synthetic.sentence(draw, first)}
        if named.text_pair:
            row["text_pair"] = synthetic.sentence(draw, (first + kind) % kinds)
        if recipe.problem_type == labels.MULTI_LABEL or columns or separator:
            both = sorted({kind, draw.randrange(kinds)})
            row["text"] = " and ".join(synthetic.sentence(draw, one) for one in both)
            given = [synthetic.class_value(names, one) for one in both]
            flags = {f"{labels.LABEL_COLUMN}{number}": int(name in given) for number, name in enumerate(columns)}
            return row | flags | {"label": separator.join(map(str, given)) if separator else given}
        label = 2.5 * kind if recipe.problem_type == "regression" else synthetic.class_value(names, kind)
        return row | {"label": label}


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, classes: labels.Labels | None) -> Dataset:
    """Return the features of one split; without `classes` those of rows without a label."""
    from datasets import ClassLabel

    roles = _texts(rows)
    tokens.refuse_other_than_text(rows, roles)
    inputs = tokenizer("a", "b" if len(roles) == 2 else None)

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        texts = [tokens.texts(rows, role, batch, indices) for role in roles]
        return _encoded(tokenizer, longest, classes, texts, classes.raw(batch) if classes is not None else ())

    # Features said outright, and a new column for the ids: a `map` that overwrites a text column with integers casts
    # them back to text, and Metal refuses the float64 that a plain Python float would become on the way.
    label: dict[str, Any] = {}
    if isinstance(classes, labels.LabelSets):
        label = {"labels": ("float32",)}
    elif classes is not None:
        label = {"labels": ClassLabel(names=list(classes.names)) if classes.names else "float32"}
    key, kinds = ("text-classification", longest, roles, classes), dict.fromkeys(inputs, ("int32",)) | label
    return tokens.map_cached(rows, encode, content=content, key=key, features=kinds)


def _encoded(
    tokenizer: Any, longest: int, classes: labels.Labels | None, texts: Sequence[list[str]], raw_labels: Sequence[Any]
) -> dict[str, Any]:
    encoded = tokenizer(*texts, truncation=True, max_length=longest)
    return {**encoded, **({"labels": [classes.encode(raw) for raw in raw_labels]} if classes else {})}


def _texts(rows: Rows) -> list[str]:
    return [role for role in ("text", "text_pair") if role in rows.dataset.column_names]
