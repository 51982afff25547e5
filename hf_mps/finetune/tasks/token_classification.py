"""Token classification: a tag for each word, such as the names of people and places (NER) or parts of speech."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import label_sets, labels, synthetic
from hf_mps.finetune.models import classification, tagging
from hf_mps.finetune.models.tagging import Tagging
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.finetune.text import lengths, tokens, word_labels

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.data.load import Rows
    from hf_mps.finetune.models.checkpoint import Checkpoint

AUTO_CLASS = "AutoModelForTokenClassification"
TRUTH = ("tags",)


class Columns(schema.Columns):
    """The columns of the data by their roles: lists of words, and of as many tags, or of lists of a word's labels."""

    words: str = "tokens"
    tags: str = "ner_tags"


class Data(schema.Labelled):
    """Adds the columns, `labels`: the tags in the order of their ids, and `separator` between the labels of a word."""

    TEXT: ClassVar[Literal["text", "conll"]] = "conll"

    columns: Columns = Columns()
    separator: str | None = Field(default=None, min_length=1)


class Recipe(lengths.Padded):
    """Adds transformers' `problem_type`, and `config_overrides` for the model's configuration.

    Where words have several labels, one is answered from the probability `threshold` on (0.5). O, and in text an
    underscore or nothing, says that a word has none.
    """

    task: Literal["token-classification"]
    data: Data
    problem_type: Literal["single_label_classification", "multi_label_classification"] | None = None
    threshold: float | None = Field(default=None, gt=0, lt=1)
    config_overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _several_or_one(self) -> Recipe:
        for key, said in (("data.separator", self.data.separator), ("threshold", self.threshold)):
            if said and self.problem_type == "single_label_classification":
                raise ValueError(f"has {key} beside problem_type: {self.problem_type}; leave one of them out")
        return self


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return sentences whose words reveal their tags: the recipe's own set of tags, or people and places."""
    draw, named, separator = random.Random(recipe.seed), recipe.data.columns, recipe.data.separator
    several = bool(separator or recipe.threshold) or recipe.problem_type == label_sets.PROBLEM
    tags = recipe.data.labels or ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]

    def row(first: int) -> dict[str, Any]:
        chosen = [(first + step * draw.randrange(1, 3)) % len(tags) for step in range(draw.randrange(4, 9))]
        said = [synthetic.word(draw, kind) for kind in chosen]
        if not several:
            return {named.words: said, named.tags: [tags[kind] for kind in chosen]}
        # A word reveals its own label, and the one behind it where that is another.
        labels_of = [[tags[kind], *([tags[kind + 1]] if kind % 2 and kind + 1 < len(tags) else [])] for kind in chosen]
        return {named.words: said, named.tags: [separator.join(one) for one in labels_of] if separator else labels_of}

    rows = synthetic.splits_of(recipe.data)
    return {split: [row(number) for number in range(count)] for split, count in rows.items()}


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make features, model, collator and metrics from the rows of every split.

    Raises UserError for tags, lengths, a tokenizer or a checkpoint that cannot be used.
    """
    import transformers

    tags = tagging.decide(recipe, rows["train"], [rows[split] for split in rows if split != "train"])
    classification.refuse_smoothing(recipe.training, tags.problem_type, "tag a word")
    measured = tags.measures(recipe.metrics, recipe.task)
    tokenizer = _tokenizer(checkpoint)
    config = labels.configure(checkpoint.config(), tags.names, recipe.config_overrides)
    config.problem_type = tags.problem_type
    longest = lengths.limit(recipe, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    content = tokens.digest(tokenizer)
    features = {split: _tokenised(rows[split], tokenizer, content, longest, tags) for split in rows}
    counts = {split: tokens.counts(features[split]) for split in features}
    length = lengths.decide(recipe, counts["train"], longest, others=itertools.chain(*counts.values()))
    unseen = {split: _unseen(rows[split], features[split]) for split in ("train", "validation")}
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    inputs = {split: features[split].remove_columns("words_seen") for split in features}
    collator = length.value.collator(transformers.DataCollatorForTokenClassification(tokenizer), tokenizer)
    return Prepared(
        splits=inputs,
        model=model,
        processing_class=tokenizer,
        collator=tags.collator(collator, tokenizer),
        metrics=measured,
        compute_metrics=lambda evaluated: tags.measured(evaluated, measured),
        baseline=tags.baseline(measured, features),
        auto_class=AUTO_CLASS,
        pipeline_tag="token-classification",
        choices={
            "lengths": length,
            **tags.choices(features["train"]),
            **unseen_words(unseen),
            **lent,
            "model": weights,
        },
        trainer_settings={"preprocess_logits_for_metrics": tags.kept, "compute_loss_func": tags.loss},
        token_counts=counts["train"],
        predict=lambda trainer: _predicted(
            rows["validation"], features["validation"], trainer.predict(inputs["validation"]), tags
        ),
        figures=tags.figures,
        snippet=tags.snippet,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved tagger answers. Raises UserError for a tokenizer or checkpoint that cannot be used."""
    import transformers

    tokenizer, config = _tokenizer(checkpoint), checkpoint.config()
    tags, content = tagging.kept(config, recipe.threshold, chosen), tokens.digest(tokenizer)
    length = lengths.kept(recipe, chosen, tokenizer, config)
    lent = tokens.set_pad_token(tokenizer, config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows, every: bool = False) -> list[dict[str, Any]]:
        word_labels.refuse_other_than_lists(rows)
        features = _tokenised(rows, tokenizer, content, length.value.longest, None)
        return _predicted(rows, features, trainer.predict(features.remove_columns("words_seen")), tags, every)

    return Answering(
        model=model,
        processing_class=tokenizer,
        collator=length.value.collator(transformers.DataCollatorForTokenClassification(tokenizer), tokenizer),
        answers=answers,
        every=partial(answers, every=True),
        choices={"model": weights, "lengths": length, **tags.choices(), **lent},
        trainer_settings={"preprocess_logits_for_metrics": tags.whole},
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


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, tags: Tagging | None) -> Dataset:
    """Return one split's features, with `words_seen`, the numbers of the labelled words in their order.

    Without `tags` the labels, all 0, mark the token that answers for each word.
    """
    from datasets import Features, List, Value

    made = tags.targets(rows) if tags is not None else None

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        encoded = tokenizer(batch["words"], is_split_into_words=True, truncation=True, max_length=longest)
        ids = [encoded.word_ids(number) for number in range(len(indices))]
        if made is not None:
            targets = [made(row, raw) for row, raw in zip(ids, batch["tags"], strict=True)]
        else:
            targets = [word_labels.align(row, [0] * len(own)) for row, own in zip(ids, batch["words"], strict=True)]
        return {**encoded, "labels": targets, "words_seen": [word_labels.labelled_words(row) for row in ids]}

    inputs = tokenizer(["a"], is_split_into_words=True)
    kind = tags.feature if tags is not None else Value("int64")
    return tokens.map_cached(
        rows,
        encode,
        content=content,
        key=("token-classification", longest, tags and tags.key),
        features=Features({name: List(Value("int32")) for name in (*inputs, "words_seen")} | {"labels": List(kind)}),
    )


def _unseen(rows: Rows, features: Dataset) -> tuple[int, int]:
    total = sum(tokens.counts(rows.dataset, "words"))
    return total - sum(tokens.counts(features, "words_seen")), total


def _predicted(
    rows: Rows, features: Dataset, evaluated: Any, tags: Tagging, every: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv, one for each word; a word without a token has no prediction.

    Rows without tags have no truth. `every` is as in `Tagging.answered`.
    """
    lines: list[dict[str, Any]] = []
    truth = tags.truth(rows) if "tags" in rows.dataset.column_names else None
    found = zip(rows.dataset, features["words_seen"], tags.answered(evaluated, every), strict=True)
    for index, (row, numbers, answers) in enumerate(found):
        answered = dict(zip(numbers, answers, strict=True))
        for number, word in enumerate(row["words"]):
            line = {"row": rows.number(index), "word": word}
            if truth is not None:
                line["label"] = truth(row["tags"][number])
            lines.append(line | answered.get(number, {}))
    return lines
