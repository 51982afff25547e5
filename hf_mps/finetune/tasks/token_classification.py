"""Token classification: a tag for each word, such as the names of people and places (NER) or parts of speech."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.models import classification
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._base import Dataset, Prepared
from hf_mps.finetune.tasks._text import TextTask
from hf_mps.finetune.text import lengths, tokens, word_labels
from hf_mps.finetune.text.padding import IGNORED
from hf_mps.metrics.selection import of_tags


class Columns(schema.Columns):
    """The columns of the data by their roles: a list of words in each row, and a list of as many tags."""

    words: str = "tokens"
    """The column of lists of words."""
    tags: str = "ner_tags"
    """The column of lists of tags."""


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the tags in the order of their ids."""

    TEXT: ClassVar[Literal["text", "conll"]] = "conll"

    columns: Columns = Columns()


class Recipe(lengths.Padded):
    """Adds `config_overrides` for the model's configuration. Each word has one tag."""

    task: Literal["token-classification"]
    """What the model learns to do."""
    data: Data
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's configuration."""


class TokenClassification(TextTask):
    """Learns a tag for each word."""

    name = "token-classification"
    recipe_class = Recipe
    truth = ("tags",)
    architectures = ("ForTokenClassification",)
    shape = "encoder"
    collator_class = "DataCollatorForTokenClassification"
    has_probabilities = True
    recipe: Recipe

    @staticmethod
    def keep(logits: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Keep the tags' ids and probabilities, each (rows, tokens), and those of all tags, (rows, tokens, tags)."""
        every = classification.logits_of(logits).float().softmax(-1)
        shares, ids = every.max(-1)
        return ids, shares, every

    def tokenizer_of(self) -> Any:
        """Return the checkpoint's tokenizer, which must tell the word of each token.

        A tokenizer that marks the beginning of a word by the space before it (RoBERTa, GPT-2) gets a space before each.
        """
        tokenizer = self.checkpoint.tokenizer()
        if not tokenizer.is_fast:
            raise UserError(
                f"model {self.checkpoint.name}: its tokenizer cannot tell which word a token is of; allowed: a fast"
                " tokenizer (https://huggingface.co/docs/transformers/fast_tokenizers)"
            )
        if getattr(tokenizer, "add_prefix_space", None) is False:
            return self.checkpoint.tokenizer(add_prefix_space=True)
        return tokenizer

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, train = self.recipe, rows["train"]
        others = [some for split, some in rows.items() if split != "train"]
        tags = self.tags = word_labels.decide(train, others, recipe.data.labels)
        measured = of_tags(recipe.metrics, tags.names, recipe.task)
        self.choices["tags"] = word_labels.described(tags)
        self.choices |= labels.doubted("tags", labels.doubts(tags.names))
        self.begin(labels.configure(self.checkpoint.config(), tags.names, recipe.config_overrides))
        features, counts = self.encoded(rows)
        self.choices |= _unseen_words(rows, features)
        self.finish()
        truths = {split: _named(features[split]["labels"], tags.names) for split in SPLITS}
        return self.made(
            splits={split: features[split].remove_columns("words_seen") for split in features},
            metrics=measured,
            compute_metrics=lambda evaluated: measured.compute(
                _named(evaluated.predictions[0], tags.names, evaluated.label_ids),
                _named(evaluated.label_ids, tags.names),
            ),
            baseline=measured.baseline(truths["validation"], truths["train"]),
            # Without the probabilities of all tags, which would be held for every row.
            trainer_settings={"preprocess_logits_for_metrics": lambda logits, labels: self.keep(logits, labels)[:2]},
            token_counts=counts,
            predicted=(rows["validation"], features["validation"]),
            figures=self._figures,
            snippet=self.snippet if tags.chunked else None,
        )

    def recall(self, config: Any, chosen: Mapping[str, Any]) -> None:
        self.tags = word_labels.kept(config)

    def inputs(self, rows: Rows) -> Dataset:
        word_labels.refuse_other_than_lists(rows)
        tags = self.tags if "tags" in rows.dataset.column_names else None
        return _tokenised(rows, self.tokenizer, self.content, self.longest, tags)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield a row for each word; a word without a token has no prediction."""
        evaluated, tags = trainer.predict(inputs.remove_columns("words_seen")), self.tags
        for index, (row, numbers) in enumerate(zip(rows.dataset, inputs["words_seen"], strict=True)):
            kept = evaluated.label_ids[index] != IGNORED
            found = zip(*(table[index][kept] for table in evaluated.predictions), strict=True)
            answered = dict(zip(numbers, found, strict=True))
            for number, word in enumerate(row["words"]):
                line = {"row": rows.number(index), "word": word}
                if "tags" in row:
                    line["label"] = tags.names[tags.keys[labels.key(row["tags"][number])]]
                if number in answered:
                    tag, share, *whole = answered[number]
                    line |= {"prediction": tags.names[tag], "probability": round(float(share), 4)}
                    line |= classification.by_name(whole[0], tags.names) if every else {}
                yield line

    def _figures(self, predicted: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
        from hf_mps.finetune.report import classes

        pairs = [(row["label"], row["prediction"]) for row in predicted if "prediction" in row]
        return classes.confusion(pairs, self.tags.names, of="words")

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Return sentences whose words reveal their tags: the recipe's own set of tags, or people and places."""
        draw, named = random.Random(recipe.seed), recipe.data.columns
        tags = recipe.data.labels or ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]

        def row(first: int) -> dict[str, Any]:
            chosen = [(first + step * draw.randrange(1, 3)) % len(tags) for step in range(draw.randrange(4, 9))]
            return {
                named.words: [synthetic.word(draw, kind) for kind in chosen],
                named.tags: [tags[kind] for kind in chosen],
            }

        rows = synthetic.splits_of(recipe.data)
        return {split: [row(number) for number in range(count)] for split, count in rows.items()}


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, tags: word_labels.Tags | None) -> Dataset:
    """Return one split's features, with `words_seen`, the numbers of the labelled words in their order.

    Without `tags` the labels, all 0, mark the token that answers for each word.
    """
    from datasets import Features, List, Value

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        encoded = tokenizer(batch["words"], is_split_into_words=True, truncation=True, max_length=longest)
        ids = [encoded.word_ids(number) for number in range(len(indices))]
        own = [[0] * len(words) for words in batch["words"]] if tags is None else map(tags.ids, batch["tags"])
        targets = [word_labels.align(row, of_words) for row, of_words in zip(ids, own, strict=True)]
        return {**encoded, "labels": targets, "words_seen": [word_labels.labelled_words(row) for row in ids]}

    inputs = tokenizer(["a"], is_split_into_words=True)
    return tokens.map_cached(
        rows,
        encode,
        content=content,
        key=("token-classification", longest, tags and (tags.names, tags.keys)),
        features=Features(
            {name: List(Value("int32")) for name in (*inputs, "words_seen")} | {"labels": List(Value("int64"))}
        ),
    )


def _named(table: Any, names: Sequence[str], truths: Any = None) -> list[list[str]]:
    """Return the tags' names where `truths`, by default `table` itself, are not IGNORED; all are ids by row."""
    pairs = zip(table, table if truths is None else truths, strict=True)
    return [[names[tag] for tag, truth in zip(*pair, strict=True) if truth != IGNORED] for pair in pairs]


def _unseen_words(rows: Mapping[str, Rows], features: Mapping[str, Dataset]) -> dict[str, Choice[str]]:
    """Report the words without a token, which have no tag to learn or measure."""
    parts = []
    for split in SPLITS:
        total = sum(tokens.counts(rows[split].dataset, "words"))
        if unseen := total - sum(tokens.counts(features[split], "words_seen")):
            parts.append(f"{unseen} of {total} {split} words")
    reason = "cut off at max_length, or nothing to the tokenizer: neither trained on nor measured"
    return {"words_left_out": Choice(", ".join(parts), reason)} if parts else {}
