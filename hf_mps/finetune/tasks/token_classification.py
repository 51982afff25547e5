"""Token classification: a tag for each word, such as the names of people and places (NER) or parts of speech."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, load, synthetic
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths, tokens, word_labels
from hf_mps.finetune.text.padding import IGNORED
from hf_mps.metrics.tagged import TagMetrics, of_tags

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.models.checkpoint import Checkpoint

AUTO_CLASS = "AutoModelForTokenClassification"
TRUTH = ("tags",)
SNIPPET = """from transformers import pipeline

tagger = pipeline("token-classification", model=".", aggregation_strategy="simple")
print(tagger("Ada Lovelace lived in London."))"""


class Columns(schema.Columns):
    """The columns of the data by their roles: lists of words, and of as many tags."""

    words: str = "tokens"
    tags: str = "ner_tags"


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the tags in the order of their ids."""

    TEXT: ClassVar[Literal["text", "conll"]] = "conll"

    columns: Columns = Columns()


class Recipe(lengths.Padded):
    """Adds `config_overrides` for the model's configuration."""

    task: Literal["token-classification"]
    data: Data
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return sentences whose words reveal their tags: the recipe's own set of tags, or people and places."""
    draw, named = random.Random(recipe.seed), recipe.data.columns
    tags = recipe.data.labels or ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]

    def row(first: int) -> dict[str, Any]:
        chosen = [tags[(first + step * draw.randrange(1, 3)) % len(tags)] for step in range(draw.randrange(4, 9))]
        said = [synthetic.word(draw, tags.index(tag)) for tag in chosen]
        return {named.words: said, named.tags: chosen}

    rows = synthetic.splits((*load.splits_to_read(recipe.data), "validation"))
    return {split: [row(number) for number in range(count)] for split, count in rows.items()}


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of every split.

    Raises UserError for tags, lengths, a tokenizer or a checkpoint that cannot be used.
    """
    import transformers

    tags = word_labels.decide(rows["train"], [rows[split] for split in rows if split != "train"], recipe.data.labels)
    measured = of_tags(recipe.metrics, tags.names, recipe.task)
    tokenizer = _tokenizer(checkpoint)
    config = labels.configure(checkpoint.config(), tags.names, recipe.config_overrides)
    longest = lengths.limit(recipe, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    content = tokens.digest(tokenizer)
    features = {split: _tokenised(rows[split], tokenizer, content, longest, tags) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    length = lengths.decide(recipe, counts["train"], longest, others=itertools.chain(*counts.values()))
    unseen = {split: _unseen(rows[split], features[split]) for split in ("train", "validation")}
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    inputs = {split: features[split].remove_columns("words_seen") for split in features}
    truths = {split: _truths(features[split], tags) for split in ("train", "validation")}
    collator = transformers.DataCollatorForTokenClassification(tokenizer)
    return Prepared(
        splits=inputs,
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(collator, tokenizer),
        metrics=measured,
        compute_metrics=lambda evaluated: _measured(evaluated, tags, measured),
        baseline=measured.baseline(truths["validation"], truths["train"]),
        auto_class=AUTO_CLASS,
        pipeline_tag="token-classification",
        choices={"lengths": length, **word_labels.choices(tags), **unseen_words(unseen), **lent, "model": weights},
        trainer_settings={"preprocess_logits_for_metrics": _answers},
        token_counts=counts["train"],
        predict=lambda trainer: _predicted(
            rows["validation"], features["validation"], trainer.predict(inputs["validation"]), tags
        ),
        figures=lambda predicted: _figures(predicted, tags),
        snippet=SNIPPET if tags.chunked else None,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved tagger answers. Raises UserError for a tokenizer or checkpoint that cannot be used."""
    import transformers

    tokenizer, config = _tokenizer(checkpoint), checkpoint.config()
    tags, content = word_labels.kept(config), tokens.digest(tokenizer)
    length = lengths.kept(recipe, chosen, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows) -> list[dict[str, Any]]:
        word_labels.refuse_other_than_lists(rows)
        features = _tokenised(rows, tokenizer, content, length.value.longest, None)
        return _predicted(rows, features, trainer.predict(features.remove_columns("words_seen")), tags)

    return Answering(
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(transformers.DataCollatorForTokenClassification(tokenizer), tokenizer),
        answers=answers,
        choices={"model": weights, "lengths": length, "tags": word_labels.described(tags), **lent},
        trainer_settings={"preprocess_logits_for_metrics": _answers},
    )


def unseen_words(counts: Mapping[str, tuple[int, int]]) -> dict[str, Choice[str]]:
    """Report words without a token, which have no tag to learn or measure; `counts` is {split: (unseen, all)}."""
    parts = [f"{unseen} of {total} {split} words" for split, (unseen, total) in counts.items() if unseen]
    if not parts:
        return {}
    reason = "cut off at max_length, or nothing to the tokenizer: neither trained on nor measured"
    return {"words_left_out": Choice(", ".join(parts), reason)}


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's tokenizer, which must tell the word of each token.

    A tokenizer that marks the beginning of a word by the space before it (RoBERTa, GPT-2) gets a space before each.
    """
    tokenizer = checkpoint.tokenizer()
    if not tokenizer.is_fast:
        raise UserError(
            f"model {checkpoint.name}: its tokenizer cannot tell which word a token is of; allowed: a fast tokenizer"
            " (https://huggingface.co/docs/transformers/fast_tokenizers)"
        )
    if getattr(tokenizer, "add_prefix_space", None) is False:
        return checkpoint.tokenizer(add_prefix_space=True)
    return tokenizer


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, tagset: word_labels.Tags | None) -> Dataset:
    """Return one split's features, with `words_seen`, the numbers of the labelled words in their order.

    Without a `tagset` the labels, all 0, mark the token that answers for each word.
    """
    from datasets import Features, List, Value

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        encoded = tokenizer(batch["words"], is_split_into_words=True, truncation=True, max_length=longest)
        ids = [encoded.word_ids(number) for number in range(len(indices))]
        known = [tagset.ids(raw) for raw in batch["tags"]] if tagset else [[0] * len(row) for row in batch["words"]]
        tags = [word_labels.align(row, own) for row, own in zip(ids, known, strict=True)]
        return {**encoded, "labels": tags, "words_seen": [word_labels.labelled_words(row) for row in ids]}

    inputs = tokenizer(["a"], is_split_into_words=True)
    return tokens.map_cached(
        rows,
        encode,
        content=content,
        key=("token-classification", longest, tagset and (tagset.names, tagset.keys)),
        features=Features(
            {name: List(Value("int32")) for name in (*inputs, "words_seen")} | {"labels": List(Value("int64"))}
        ),
    )


def _unseen(rows: Rows, features: Dataset) -> tuple[int, int]:
    total = sum(tokens.counts(rows.dataset, "words"))
    return total - sum(tokens.counts(features, "words_seen")), total


def _truths(features: Dataset, tagset: word_labels.Tags) -> list[list[str]]:
    return [[tagset.names[tag] for tag in row if tag != IGNORED] for row in features["labels"]]


def _answers(logits: Any, _labels: Any) -> tuple[Any, Any]:
    """Return the predicted tags' ids and probabilities, each of shape (rows, tokens); the logits would fill memory."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    shares, ids = logits.float().softmax(-1).max(-1)
    return ids, shares


def _measured(evaluated: Any, tagset: word_labels.Tags, measured: TagMetrics) -> dict[str, float]:
    ids, _ = evaluated.predictions
    kept = evaluated.label_ids != IGNORED
    answers, truths = (
        [[tagset.names[tag] for tag in row[mask]] for row, mask in zip(table, kept, strict=True)]
        for table in (ids, evaluated.label_ids)
    )
    return measured.compute(answers, truths)


def _predicted(rows: Rows, features: Dataset, evaluated: Any, tagset: word_labels.Tags) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv, one for each word; a word without a token has no prediction.

    Rows without tags have no truth.
    """
    lines: list[dict[str, Any]] = []
    labelled = "tags" in rows.dataset.column_names
    kept = evaluated.label_ids != IGNORED
    for index, (row, numbers) in enumerate(zip(rows.dataset, features["words_seen"], strict=True)):
        answers = zip(*(table[index][kept[index]] for table in evaluated.predictions), strict=True)
        answered = dict(zip(numbers, answers, strict=True))
        for number, word in enumerate(row["words"]):
            line = {"row": rows.number(index), "word": word}
            if labelled:
                line["label"] = tagset.names[tagset.keys[labels.key(row["tags"][number])]]
            if number in answered:
                answer, share = answered[number]
                line |= {"prediction": tagset.names[answer], "probability": round(float(share), 4)}
            lines.append(line)
    return lines


def _figures(predicted: Sequence[Mapping[str, Any]], tagset: word_labels.Tags) -> Mapping[str, bytes]:
    from hf_mps.finetune.report import classes

    pairs = [(row["label"], row["prediction"]) for row in predicted if "prediction" in row]
    return classes.confusion(pairs, tagset.names, of="words")
