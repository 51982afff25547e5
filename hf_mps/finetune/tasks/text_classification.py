"""Text classification: one text or a pair of texts, to a class or, where the labels are floats, to a number."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hf_mps.choice import Choice
from hf_mps.errors import UserError, nearest
from hf_mps.finetune import labels, lengths, metrics, tokens
from hf_mps.finetune import recipe as recipes
from hf_mps.finetune.task import Prepared

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.checkpoint import Checkpoint
    from hf_mps.finetune.data import Rows

AUTO_CLASS = "AutoModelForSequenceClassification"
# Part of every cache key: raise it whenever `_tokenised` makes other features from the same rows.
FEATURES = 2


class Columns(recipes.Section):
    """The columns of the data by their roles; `text_pair` only where there is a second text."""

    text: str = "text"
    text_pair: str | None = None
    label: str = "label"

    @model_validator(mode="after")
    def _apart(self) -> Columns:
        named = [column for column in (self.text, self.text_pair, self.label) if column]
        if len(set(named)) < len(named):
            raise ValueError(f"names one column for two roles ({', '.join(named)}); give each role a column of its own")
        return self


class Data(recipes.Data):
    """Adds the columns, and `labels`: the class names in the order of their ids."""

    columns: Columns = Columns()
    labels: list[str] | None = Field(default=None, min_length=2)


class Recipe(lengths.Padded):
    """Adds transformers' `problem_type`, and `config_overrides` for the model's configuration."""

    task: Literal["text-classification"]
    data: Data
    problem_type: labels.ProblemType | None = None
    config_overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_names_of_numbers(self) -> Recipe:
        if self.problem_type == "regression" and self.data.labels:
            raise ValueError("has data.labels beside problem_type: regression; leave one of them out")
        return self


def columns(recipe: Recipe) -> dict[str, str]:
    """The role of each column that the task reads."""
    named = recipe.data.columns
    return {"text": named.text, **({"text_pair": named.text_pair} if named.text_pair else {}), "label": named.label}


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of both splits.

    Raises UserError for labels, lengths, a configuration or a checkpoint that cannot be used.
    """
    from transformers import DataCollatorWithPadding

    found = labels.decide(rows["train"], rows["validation"], recipe.data.labels, recipe.problem_type)
    measured = metrics.load(recipe.metrics or _metrics(found), num_labels=len(found.names) or None)
    tokenizer = checkpoint.tokenizer()
    config = _config(recipe, checkpoint, found)
    longest = lengths.limit(recipe, tokenizer, config)
    lent = tokens.lend_pad_token(tokenizer, config)
    content = tokens.digest(tokenizer)
    features = {split: _tokenised(rows[split], tokenizer, content, longest, found) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    length = lengths.decide(recipe, counts["train"], longest, others=itertools.chain(*counts.values()))
    choices: dict[str, Choice[Any]] = {"lengths": length, "labels": _labels(found), **lent}
    model, choices["model"] = checkpoint.model(_auto_class(), config=config)
    return Prepared(
        train=features["train"],
        validation=features["validation"],
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(DataCollatorWithPadding(tokenizer), tokenizer),
        metrics=measured,
        compute_metrics=lambda evaluated: measured.compute(_predictions(evaluated, found), evaluated.label_ids),
        baseline=measured.baseline(
            features["validation"]["labels"], train=features["train"]["labels"], regression=not found.names
        ),
        auto_class=AUTO_CLASS,
        pipeline_tag="text-classification",
        choices=choices,
        token_counts=counts["train"],
    )


def _auto_class() -> Any:
    import transformers

    return getattr(transformers, AUTO_CLASS)


def _metrics(found: labels.Labels) -> list[str]:
    """What is measured where the recipe does not say."""
    if not found.names:
        return ["pearsonr", "spearmanr"]
    return ["accuracy", "f1" if len(found.names) == 2 else "f1/macro"]


def _labels(found: labels.Labels) -> Choice[str]:
    if not found.names:
        return Choice("regression", found.reason)
    shown = ", ".join(found.names[: labels.SHOWN]) + (", …" if len(found.names) > labels.SHOWN else "")
    return Choice(f"{len(found.names)} classes: {shown}", found.reason)


def _config(recipe: Recipe, checkpoint: Checkpoint, found: labels.Labels) -> Any:
    """The checkpoint's configuration with the classes of the data, and the recipe's `config_overrides`."""
    config = checkpoint.config()
    known = config.to_dict()
    for name, value in recipe.config_overrides.items():
        if name not in known:
            raise UserError(f"config_overrides.{name} is no key of {type(config).__name__}{nearest(name, known)}")
        setattr(config, name, value)
    config.problem_type = found.problem_type
    config.num_labels = len(found.names) or 1
    if found.names:
        config.id2label = dict(enumerate(found.names))
        config.label2id = {name: number for number, name in enumerate(found.names)}
    return config


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, found: labels.Labels) -> Dataset:
    """The features of one split."""
    from datasets import ClassLabel, Features, List, Value

    roles = [role for role in ("text", "text_pair") if role in rows.dataset.column_names]
    tokens.refuse_other_than_text(rows, roles)
    inputs = tokenizer("a", "b" if len(roles) == 2 else None)

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        texts = [tokens.texts(rows, role, batch, indices) for role in roles]
        encoded = tokenizer(*texts, truncation=True, max_length=longest)
        return {**encoded, "labels": [found.encode(raw) for raw in batch["label"]]}

    # Features said outright, and a new column for the ids: a `map` that overwrites a text column with integers casts
    # them back to text, and Metal refuses the float64 that a plain Python float would become on the way.
    label = ClassLabel(names=list(found.names)) if found.names else Value("float32")
    return tokens.mapped(
        rows,
        encode,
        content=content,
        key=("text-classification", FEATURES, longest, roles, found.names, found.keys),
        features=Features({**{name: List(Value("int32")) for name in inputs}, "labels": label}),
    )


def _predictions(evaluated: Any, found: labels.Labels) -> Any:
    """Class ids, or numbers for regression, from logits of shape (rows, classes); shape (rows,)."""
    logits = evaluated.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits  # some models return hidden states behind the logits
    return logits.argmax(axis=-1) if found.names else logits.squeeze(-1)
