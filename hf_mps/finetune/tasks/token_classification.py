"""Token classification: a tag for each word, such as the names of people and places (NER) or parts of speech."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures, predictions
from hf_mps.finetune.tasks import Dataset, Prepared
from hf_mps.finetune.tasks._text import TextTask
from hf_mps.finetune.text import lengths, tokens
from hf_mps.finetune.text.lengths import IGNORED
from hf_mps.metrics import seqeval
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


class Recipe(labels.Overridden, lengths.Padded):
    """Adds `config_overrides`. Each word has one tag."""

    data: Data


class TokenClassification(TextTask[Recipe]):
    """Learns a tag for each word."""

    truth = ("tags",)
    architectures = ("ForTokenClassification",)
    shape = "encoder"
    collator_class = "DataCollatorForTokenClassification"
    has_probabilities = True

    @staticmethod
    def keep(logits: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Keep the tags' ids and probabilities, each (rows, tokens), and those of all tags, (rows, tokens, tags)."""
        every = predictions.logits_of(logits).float().softmax(-1)
        shares, ids = every.max(-1)
        return ids, shares, every

    def tokenizer_of(self) -> Any:
        """Return the checkpoint's tokenizer, which must tell the word of each token.

        A tokenizer that marks the beginning of a word by the space before it (RoBERTa, GPT-2) gets a space before each.
        """
        tokenizer = self.checkpoint.tokenizer()
        if not tokenizer.is_fast:
            told = f"model {self.checkpoint.name}: its tokenizer cannot tell which word a token is of"
            link = "https://huggingface.co/docs/transformers/fast_tokenizers"
            raise UserError(f"{told}; allowed: a fast tokenizer ({link})")
        if getattr(tokenizer, "add_prefix_space", None) is False:
            return self.checkpoint.tokenizer(add_prefix_space=True)
        return tokenizer

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        tags = self.tags = _tags(rows, recipe.data.labels)
        measured = of_tags(recipe.metrics, tags.names, recipe.task)
        self.choices["tags"] = Choice(f"{len(tags.names)} tags: {labels.listed(tags.names)}", tags.reason)
        self.choices |= labels.doubted("tags", labels.doubts(tags.names))
        self.begin(labels.configure(self.checkpoint.config(), tags.names, recipe.config_overrides))
        features, counts = self.encoded(rows)
        unseen = []
        for split in SPLITS:
            total = sum(tokens.counts(rows[split].dataset, "words"))
            if left := total - sum(tokens.counts(features[split], "words_seen")):
                unseen.append(f"{left} of {total} {split} words")
        if unseen:  # words without a token, which have no tag to learn or measure
            reason = "cut off at max_length, or nothing to the tokenizer: neither trained on nor measured"
            self.choices["words_left_out"] = Choice(", ".join(unseen), reason)
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
            # transformers' pipeline joins words by B and I alone.
            snippet=self.snippet if {tag[:2] for tag in tags.names} - {seqeval.OUTSIDE} <= {"B-", "I-"} else None,
        )

    def recall(self, config: Any, chosen: Mapping[str, Any]) -> None:
        if config.problem_type == "multi_label_classification":
            remedy = "next: the sigmoid of the logits of transformers' AutoModelForTokenClassification"
            raise UserError(f"the model has several labels a word, which hf_mps does not answer; {remedy}")
        self.tags = labels.kept(config)

    def inputs(self, rows: Rows) -> Dataset:
        _refuse_other_than_lists(rows, "words")
        for index, words in enumerate(rows.dataset["words"]):
            _refuse_gap(rows, index, words)
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
                    line["label"] = tags.names[int(tags.encode(row["tags"][number]))]
                if number in answered:
                    tag, share, *whole = answered[number]
                    line |= {"prediction": tags.names[tag], "probability": round(float(share), 4)}
                    line |= predictions.by_name(whole[0], tags.names) if every else {}
                yield line

    def _figures(self, predicted: Sequence[Mapping[str, Any]]) -> Mapping[str, bytes]:
        return pictures.confusion([row for row in predicted if "prediction" in row], self.tags.names, of="words")

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Return a sentence whose words reveal their tags: the recipe's own set of tags, or people and places."""
        draw = made.draw
        tags = recipe.data.labels or ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
        steps = [step * draw.randrange(1, 3) for step in range(draw.randrange(4, 9))]
        kinds = [(made.number + step) % len(tags) for step in steps]
        return {"words": [synthetic.word(draw, kind) for kind in kinds], "tags": [tags[kind] for kind in kinds]}


def _tokenised(rows: Rows, tokenizer: Any, content: str, longest: int, tags: labels.Labels | None) -> Dataset:
    """Return one split's features, with `words_seen`, the numbers of the labelled words in their order.

    Without `tags` the labels, all 0, mark the token that answers for each word.
    """

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        encoded = tokenizer(batch["words"], is_split_into_words=True, truncation=True, max_length=longest)
        ids = [encoded.word_ids(number) for number in range(len(indices))]
        own = [[0] * len(words) for words in batch["words"]]
        if tags is not None:
            own = [[int(tags.encode(tag)) for tag in row] for row in batch["tags"]]
        targets = [align(row, of_words) for row, of_words in zip(ids, own, strict=True)]
        seen = [list(dict.fromkeys(word for word in row if word is not None)) for row in ids]
        return {**encoded, "labels": targets, "words_seen": seen}

    inputs = tokenizer(["a"], is_split_into_words=True)
    kinds = dict.fromkeys((*inputs, "words_seen"), ("int32",)) | {"labels": ("int64",)}
    key = ("token-classification", longest, tags and (tags.names, tags.keys))
    return tokens.map_cached(rows, encode, content=content, key=key, features=kinds)


def _named(table: Any, names: Sequence[str], truths: Any = None) -> list[list[str]]:
    """Return the tags' names where `truths`, by default `table` itself, are not IGNORED; all are ids by row."""
    pairs = zip(table, table if truths is None else truths, strict=True)
    return [[names[tag] for tag, truth in zip(*pair, strict=True) if truth != IGNORED] for pair in pairs]


def _tags(every: Mapping[str, Rows], named_in_recipe: Sequence[str] | None) -> labels.Labels:
    """Return the set of tags: named by the recipe (`named_in_recipe`) or the data set, or found in the training rows.

    Raises UserError, naming file, row and tag, for rows whose words and tags differ in number, for a missing word or
    tag, and for a tag outside the set.
    """
    train = every["train"]
    for rows in every.values():
        _refuse_other_than_lists(rows, "words")
        _refuse_other_than_lists(rows, "tags")
        for index, (words, row) in enumerate(zip(rows.dataset["words"], rows.dataset["tags"], strict=True)):
            place = rows.place(index)
            _refuse_gap(rows, index, words)
            if row is None:
                raise UserError(f"{place} has no tags; allowed: a list in every row")
            if len(words) != len(row):
                raise UserError(f"{place} has {len(words)} words and {len(row)} tags; allowed: a tag for each word")
            if not words:
                raise UserError(f"{place} has no words; allowed: one or more in every row")
    inner = getattr(train.dataset.features["tags"], "feature", None)
    seen = {labels.key(tag) for row in train.dataset["tags"] for tag in row}
    numbers = getattr(inner, "dtype", None) not in tokens.TEXT
    tagset = labels.of_column(train, inner, named_in_recipe, seen, _in_order, numbers=numbers)
    for rows in every.values():
        names_of_ids = dict(enumerate(getattr(rows.dataset.features["tags"].feature, "names", ())))
        for index, row in enumerate(rows.dataset["tags"]):
            for number, tag in enumerate(row):
                if labels.key(tag) in tagset.keys:
                    continue
                place = f"{rows.place(index)}: word {number + 1}"
                if tag == -1 or labels.key(tag) == "":
                    raise UserError(f"{place} has no tag; allowed: a tag for each word")
                shown, near = labels.listed(tagset.names), nearest(labels.key(tag), tagset.names)
                name = brief(str(names_of_ids.get(tag, tag)))
                raise UserError(f"{place}: tag '{name}' is not in the set ({shown}), {tagset.reason}{near}")
    return tagset


def _in_order(tags: set[str]) -> list[str]:
    """Return O first, then the others by kind with B before I, so that ids do not depend on the order of the rows."""
    return sorted(tags, key=lambda tag: (tag != seqeval.OUTSIDE, *reversed(seqeval.split(tag))))


def align(word_ids: Sequence[int | None], tag_ids: Sequence[int]) -> list[int]:
    """Return the label of each token: its word's tag at the word's first token, IGNORED elsewhere and at special
    tokens.

    `word_ids` is what a fast tokenizer returns: the number of each token's word, None for special tokens.
    """
    token_labels: list[int] = []
    before: int | None = None
    for word in word_ids:
        token_labels.append(IGNORED if word is None or word == before else tag_ids[word])
        before = word
    return token_labels


def _refuse_gap(rows: Rows, index: int, words: Sequence[str | None] | None) -> None:
    """Raise UserError where a row has no list of words, or one of them is missing."""
    if words is None:
        raise UserError(f"{rows.place(index)} has no words; allowed: a list in every row")
    if None in words:
        raise UserError(f"{rows.place(index)}: word {words.index(None) + 1} is missing; allowed: a text for each word")


def _refuse_other_than_lists(rows: Rows, role: str) -> None:
    """Raise UserError where the column of words, or of tags, holds no lists of them."""
    kind = rows.dataset.features[role]
    inner = getattr(kind, "feature", None)
    allowed = tokens.TEXT if role == "words" else (*tokens.TEXT, "int64", "int32", "int16", "int8", "uint8")
    if role == "tags" and getattr(inner, "feature", None) is not None:
        told = "data.columns.tags names a column with a list of labels for each word"
        raise UserError(f"{rows.where}: {told}; allowed: one tag for each, such as its labels joined")
    if getattr(inner, "dtype", None) not in allowed:
        of = getattr(inner, "dtype", None)
        came = f"lists of {of}" if of else getattr(kind, "dtype", type(kind).__name__)
        texts = "texts" if role == "words" else "texts, or all of whole numbers"
        wanted = f"allowed: a list in each row, as JSON and Parquet have them, all of {texts}"
        raise UserError(f"{rows.where}: data.columns.{role} names a column of type {came}; {wanted}")
