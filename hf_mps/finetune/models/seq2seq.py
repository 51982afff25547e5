"""What summarization and translation share: the model reads one text, generates another, and is measured on that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import language
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths, tokens
from hf_mps.metrics.selection import choose

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.models.checkpoint import Checkpoint
    from hf_mps.finetune.models.language import Loaded

AUTO_CLASS = "AutoModelForSeq2SeqLM"
TRUTH = ("target",)
ARGUMENTS = ("transformers/training_args_seq2seq.py", "Seq2SeqTrainingArguments")
SETTLED = {
    "predict_with_generate": "the metrics are of generated texts, so it is always on; leave it out",
    "generation_max_length": "it is the recipe's max_target_length",
}
TARGET = 128


class Columns(schema.Columns):
    """The columns of the data by their roles; `translation.en` is a key of a column of dicts."""

    source: str
    target: str


class Recipe(language.Recipe):
    """Adds the prefix of each source, and the longest target in tokens (128 where the model has the positions).

    `source_prefix` defaults to the checkpoint's own for the task (T5's configurations have them).
    """

    source_prefix: str | None = None
    max_length: int | None = Field(default=None, ge=3)
    max_target_length: int | None = Field(default=None, ge=3)


@dataclass(frozen=True)
class Seq2SeqTask:
    """What tells the two tasks apart: metrics, baseline, and the name of the prefix in a configuration."""

    pipeline_tag: str
    metrics: tuple[str, ...]
    what: str
    untrained: Callable[[str], str]
    """The answer of the baseline to a source."""
    prefix: str


def prepare(
    recipe: Any, rows: dict[str, Rows], checkpoint: Checkpoint, task: Seq2SeqTask, settle: Callable[[Any, Any], None]
) -> Prepared:
    """Make features, model, collator and metrics; `settle(tokenizer, model)` is called with each as it is loaded.

    Raises UserError for rows, lengths or a checkpoint that cannot be used.
    """
    from transformers import DataCollatorForSeq2Seq

    chosen = choose(recipe.metrics, task.metrics, recipe.task)
    measured = metrics.load(chosen.names)
    loaded = language.load(recipe, checkpoint)
    longest_target = _longest_target(recipe.max_target_length, loaded.config)
    # Before rows are tokenised: a tokenizer of many languages writes theirs into the tokens.
    settle(loaded.tokenizer, None)
    prefix, loaded.choices["source_prefix"] = _prefix(recipe, loaded.config, task)
    features = {split: _tokenised(rows[split], loaded, prefix, longest_target) for split in rows}
    # A batch groups sources by length; its targets have any length.
    of_columns = (("input_ids", loaded.longest, None, "lengths"), ("labels", longest_target, False, "target_lengths"))
    chosen_lengths = []
    for column, longest, grouped, name in of_columns:
        counts = {split: tokens.counts(tokenised, column) for split, tokenised in features.items()}
        others = [count for some in counts.values() for count in some]
        settings: dict[str, Any] = {"others": others, "grouped": grouped, "name": name}
        chosen_lengths.append(lengths.decide(recipe, counts["train"], longest, **settings))
    sources, targets = chosen_lengths
    model = language.model(recipe, checkpoint, loaded, AUTO_CLASS, chunks=False)
    settle(loaded.tokenizer, model)
    loaded.choices["target_lengths"] = targets
    inner = DataCollatorForSeq2Seq(loaded.tokenizer, model=model)
    validation = rows["validation"].dataset
    return Prepared(
        splits=features,
        model=model,
        processing_class=loaded.tokenizer,
        collator=sources.value.collator(inner, loaded.tokenizer, labels=targets.value),
        metrics=chosen,
        compute_metrics=lambda evaluated: measured.compute(
            decoded(evaluated.predictions, loaded.tokenizer), decoded(evaluated.label_ids, loaded.tokenizer)
        ),
        baseline=metrics.Baseline(
            task.what, measured.compute([task.untrained(one) for one in validation["source"]], validation["target"])
        ),
        auto_class=AUTO_CLASS,
        pipeline_tag=task.pipeline_tag,
        choices={"lengths": sources, **loaded.choices},
        **_generating(longest_target),
        token_counts=tokens.counts(features["train"]),
        predict=lambda trainer: _generated(trainer, features["validation"], rows["validation"], loaded.tokenizer),
        **language.saved(recipe, AUTO_CLASS),
    )


def answer(
    recipe: Any,
    checkpoint: Checkpoint,
    chosen: Mapping[str, Any],
    task: Seq2SeqTask,
    settle: Callable[[Any, Any], None],
) -> Answering:
    """Return how a saved model answers sources; `settle` as in `prepare`. Raises UserError for what cannot be used."""
    from transformers import DataCollatorForSeq2Seq

    loaded = language.load(recipe, checkpoint)
    longest_target = _longest_target(recipe.max_target_length, loaded.config)
    settle(loaded.tokenizer, None)
    prefix, loaded.choices["source_prefix"] = _prefix(recipe, loaded.config, task)
    length = lengths.kept(recipe, chosen, loaded.tokenizer, loaded.config)
    loaded.longest = length.value.longest
    model = language.model(recipe, checkpoint, loaded, AUTO_CLASS, chunks=False)
    settle(loaded.tokenizer, model)

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        features = _tokenised(rows, loaded, prefix, longest_target)
        return _generated(trainer, features, rows, loaded.tokenizer)

    return Answering(
        model=model,
        processing_class=loaded.tokenizer,
        collator=length.value.collator(DataCollatorForSeq2Seq(loaded.tokenizer, model=model), loaded.tokenizer),
        answers=answers,
        choices={"lengths": length, **loaded.choices},
        **_generating(longest_target),
    )


def _generating(longest_target: int) -> dict[str, Any]:
    """Return the trainer of texts that are generated, for training and for answers."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    defaults = {"predict_with_generate": True, "generation_max_length": longest_target}
    return {"trainer": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments, "arguments_defaults": defaults}


def decoded(ids: Any, tokenizer: Any) -> list[str]:
    """Return texts for ids of shape (rows, tokens), -100 behind a row's end."""
    import numpy

    ids = ids[0] if isinstance(ids, tuple) else ids
    whole = numpy.where(ids < 0, tokenizer.pad_token_id, ids)
    return [text.strip() for text in tokenizer.batch_decode(whole, skip_special_tokens=True)]


def _longest_target(max_target_length: int | None, config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None) or 2**31  # T5 has no such limit
    if max_target_length is not None and max_target_length > positions:
        raise UserError(
            f"max_target_length is {max_target_length}; allowed: at most {positions}, the positions of this model"
        )
    return max_target_length or min(TARGET, positions)


def _prefix(recipe: Any, config: Any, kind: Seq2SeqTask) -> tuple[str, Choice[str]]:
    """Return the prefix of each source, and the choice to be shown."""
    if recipe.source_prefix is not None:
        return recipe.source_prefix, Choice(repr(recipe.source_prefix), "source_prefix in the recipe")
    own = (getattr(config, "task_specific_params", None) or {}).get(kind.prefix, {}).get("prefix")
    if own:
        return own, Choice(repr(own), f"the checkpoint's own for {kind.prefix}")
    return "", Choice("none", "neither the recipe nor the checkpoint's configuration has one")


def _tokenised(rows: Rows, loaded: Loaded, prefix: str, longest_target: int) -> Dataset:
    """Return sources with their prefix as ids and targets as labels, each cut to its longest length.

    Rows without targets get one token: Seq2SeqTrainer computes a loss behind each answer, and fails without labels.
    """
    from datasets import Features, List, Value

    labelled = "target" in rows.dataset.column_names
    tokens.refuse_other_than_text(rows, ("source", "target") if labelled else ("source",))
    tokenizer, longest = loaded.tokenizer, loaded.longest
    names = ("input_ids", "attention_mask", "labels")

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        sources = tokens.texts(rows, "source", batch, indices)
        found = tokenizer([prefix + one for one in sources], truncation=True, max_length=longest)
        labels = [[tokenizer.pad_token_id]] * len(sources)
        if labelled:
            targets = tokens.texts(rows, "target", batch, indices)
            labels = tokenizer(text_target=targets, truncation=True, max_length=longest_target)["input_ids"]
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}

    languages = [getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
    key = ("seq2seq", longest, longest_target, prefix, languages)
    kinds = Features({name: List(Value("int32")) for name in names})
    return tokens.map_cached(rows, encode, content=loaded.content, key=key, features=kinds)


def _generated(trainer: Any, features: Dataset, rows: Rows, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield each row's source, its target where it has one, and what the model generates."""
    texts = decoded(trainer.predict(features).predictions, tokenizer)
    for row, text in zip(rows.dataset, texts, strict=True):
        truth = {"reference": row["target"]} if "target" in row else {}
        yield {"prompt": row["source"], **truth, "generated": text}
