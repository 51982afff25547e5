"""Text classification: one text or a pair of texts, to a class or, where the labels are floats, to a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hf_mps.choice import Choice
from hf_mps.errors import UserError, nearest
from hf_mps.finetune import labels, lengths, metrics
from hf_mps.finetune import recipe as recipes
from hf_mps.finetune.lengths import Lengths
from hf_mps.finetune.task import Prepared

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.checkpoint import Checkpoint
    from hf_mps.finetune.data import Rows

AUTO_CLASS = "AutoModelForSequenceClassification"
# Part of every cache key: raise it whenever `_tokenised` makes other features from the same rows.
FEATURES = 1


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


class Recipe(recipes.Recipe):
    """Adds the lengths, transformers' `problem_type`, and `config_overrides` for the model's configuration."""

    task: Literal["text-classification"]
    data: Data
    max_length: int | None = Field(default=None, ge=3)
    padding: lengths.Padding | None = None
    pad_to_multiple_of: int | None = Field(default=None, ge=1)
    problem_type: labels.ProblemType | None = None
    config_overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_padding(self) -> Recipe:
        if self.padding == "max_length" and self.pad_to_multiple_of is not None:
            raise ValueError("has pad_to_multiple_of beside padding: max_length; leave one of them out")
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
    length = lengths.decide(recipe.max_length, recipe.padding, recipe.pad_to_multiple_of, device, tokenizer, config)
    choices: dict[str, Choice[Any]] = {"lengths": length, "labels": _labels(found)}
    choices |= _pad_token(tokenizer, config)
    content = _content(tokenizer)
    features = {split: _tokenised(rows[split], tokenizer, content, length.value, found) for split in rows}
    model, choices["model"] = checkpoint.model(_auto_class(), config=config)
    choices["lengths"] = Choice(
        length.value, f"{length.reason}; {lengths.summary(_lengths(features['train']), length.value.longest)}"
    )
    pad = length.value
    return Prepared(
        train=features["train"],
        validation=features["validation"],
        model=model,
        processing_class=tokenizer,
        collator=DataCollatorWithPadding(tokenizer, pad.padding, pad.longest, pad.multiple),
        metrics=measured,
        compute_metrics=lambda evaluated: measured.compute(_predictions(evaluated, found), evaluated.label_ids),
        baseline=measured.baseline(
            features["validation"]["labels"], train=features["train"]["labels"], regression=not found.names
        ),
        auto_class=AUTO_CLASS,
        pipeline_tag="text-classification",
        choices=choices,
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


def _pad_token(tokenizer: Any, config: Any) -> dict[str, Choice[str]]:
    """Lend a tokenizer that has no padding token the end-of-text token, as decoder checkpoints need."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("the model's tokenizer has neither a padding nor an end token, so rows cannot be batched")
        tokenizer.pad_token = tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id
        return {
            "pad_token": Choice(tokenizer.pad_token, "the tokenizer has none of its own; the end token takes its place")
        }
    return {}


def _content(tokenizer: Any) -> str:
    """A digest of all that a tokenizer does, taken before its first call.

    The fingerprint that `Dataset.map` would take by itself is of the tokenizer's pickle, which changes with every call
    (it remembers padding and truncation), so that nothing would be found again.
    """
    from datasets.fingerprint import Hasher

    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = backend.to_str() if backend is not None else (tokenizer.get_vocab(), tokenizer.init_kwargs)
    return str(Hasher.hash((type(tokenizer).__name__, own)))


def _tokenised(rows: Rows, tokenizer: Any, content: str, length: Lengths, found: labels.Labels) -> Dataset:
    """The features of one split, kept by `datasets` under a fingerprint of everything that they depend on."""
    from datasets import ClassLabel, Features, List, Value
    from datasets.fingerprint import Hasher

    roles = [role for role in ("text", "text_pair") if role in rows.dataset.column_names]
    for role in roles:
        kind = getattr(rows.dataset.features[role], "dtype", "other")
        if kind not in ("string", "large_string"):
            raise UserError(
                f"{rows.where}: data.columns.{role} names a column of type {kind}; allowed: a column of text"
            )
    parts = (
        FEATURES,
        rows.dataset._fingerprint,
        content,
        length.longest,
        roles,
        found.names,
        found.keys,
    )
    inputs = tokenizer("a", "b" if len(roles) == 2 else None)

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        texts = [batch[role] for role in roles]
        for role, column in zip(roles, texts, strict=True):
            if None in column:
                number = rows.number(indices[column.index(None)])
                raise UserError(f"{rows.where}: row {number} has no {role}; allowed: a text in every row")
        encoded = tokenizer(*texts, truncation=True, max_length=length.longest)
        return {**encoded, "labels": [found.encode(raw) for raw in batch["label"]]}

    # Features said outright, and a new column for the ids: a `map` that overwrites a text column with integers casts
    # them back to text, and Metal refuses the float64 that a plain Python float would become on the way.
    label = ClassLabel(names=list(found.names)) if found.names else Value("float32")
    return rows.dataset.map(
        encode,
        batched=True,
        with_indices=True,
        remove_columns=rows.dataset.column_names,
        features=Features({**{name: List(Value("int32")) for name in inputs}, "labels": label}),
        new_fingerprint=Hasher.hash(parts),
    )


def _lengths(features: Dataset) -> list[int]:
    return [len(row) for row in features["input_ids"]]


def _predictions(evaluated: Any, found: labels.Labels) -> Any:
    """Class ids, or numbers for regression, from logits of shape (rows, classes); shape (rows,)."""
    logits = evaluated.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits  # some models return hidden states behind the logits
    return logits.argmax(axis=-1) if found.names else logits.squeeze(-1)
