"""Word-level labels: rows of words with a tag each, the set of tags, and which token carries which word's tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.text.padding import IGNORED
from hf_mps.finetune.text.tokens import TEXT
from hf_mps.metrics import seqeval


@dataclass(frozen=True)
class Tags:
    """`names` are the tags in the order of their ids; `keys` maps what a row may hold to an id, see `labels.key`."""

    names: tuple[str, ...]
    keys: dict[str, int]
    reason: str

    @property
    def chunked(self) -> bool:
        """Return whether the tags mark names (B-PER, I-PER, O), which seqeval measures, and not each word alone."""
        return seqeval.is_chunked(self.names)

    def ids(self, raw: Sequence[Any]) -> list[int]:
        """Return the ids of one row's tags."""
        return [self.keys[labels.key(tag)] for tag in raw]


def decide(train: Rows, others: Iterable[Rows], named_in_recipe: Sequence[str] | None = None) -> Tags:
    """Return the set of tags: named by the recipe (`named_in_recipe`) or the data set, or found in the training rows.

    Raises UserError, naming file, row and tag, for rows whose words and tags differ in number, for a missing word or
    tag, and for a tag outside the set.
    """
    splits = (train, *others)
    for rows in splits:
        refuse_other_than_lists(rows)
        refuse_other_than_lists(rows, "tags")
        refuse_uneven(rows)
    inner = getattr(train.dataset.features["tags"], "feature", None)
    named = getattr(inner, "names", None)
    seen = {labels.key(tag) for row in train.dataset["tags"] for tag in row}
    if classes := named_in_recipe or named:
        reason = "data.labels in the recipe" if named_in_recipe else labels.NAMED
        are_words = getattr(inner, "dtype", None) in TEXT and not hasattr(inner, "names")
        tagset = Tags(tuple(classes), labels.keys(classes, seen, ids=not are_words), reason)
    else:
        # O first, then by kind with B before I, so that ids do not depend on the order of the rows.
        ordered = sorted(seen, key=lambda tag: (tag != seqeval.OUTSIDE, *reversed(seqeval.split(tag))))
        tagset = Tags(tuple(ordered), {tag: number for number, tag in enumerate(ordered)}, f"found in {train.where}")
    for rows in splits:
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


def kept(config: Any) -> Tags:
    """Return the tags that a saved model's configuration names, in the order of their ids.

    Raises UserError for a model of several labels a word, whose logits are no choice among its tags.
    """
    if config.problem_type == "multi_label_classification":
        remedy = "next: the sigmoid of the logits of transformers' AutoModelForTokenClassification"
        raise UserError(f"the model has several labels a word, which hf_mps does not answer; {remedy}")
    found = labels.kept(config)
    return Tags(found.names, found.keys, found.reason)


def described(tagset: Tags) -> Choice[str]:
    """Return the tags in words, as a header shows them."""
    return Choice(f"{len(tagset.names)} tags: {labels.listed(tagset.names)}", tagset.reason)


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


def labelled_words(word_ids: Sequence[int | None]) -> list[int]:
    """Return the numbers of the words that have a token, in the order of `align`'s labels other than -100.

    Words that were cut off, or that the tokenizer turns into nothing, are missing.
    """
    return list(dict.fromkeys(word for word in word_ids if word is not None))


def refuse_other_than_lists(rows: Rows, role: str = "words") -> None:
    """Raise UserError where the column of words, or of tags, holds no lists of them."""
    kind = rows.dataset.features[role]
    inner = getattr(kind, "feature", None)
    allowed = TEXT if role == "words" else (*TEXT, "int64", "int32", "int16", "int8", "uint8")
    if role == "tags" and getattr(inner, "feature", None) is not None:
        told = "data.columns.tags names a column with a list of labels for each word"
        raise UserError(f"{rows.where}: {told}; allowed: one tag for each, such as its labels joined")
    if getattr(inner, "dtype", None) not in allowed:
        came = getattr(kind, "dtype", None) or type(kind).__name__
        wanted = f"allowed: a list of {role} in each row, as JSON and Parquet have them"
        raise UserError(f"{rows.where}: data.columns.{role} names a column of type {came}; {wanted}")


def refuse_uneven(rows: Rows) -> None:
    """Raise UserError where words and tags differ in number in a row, or a word is missing."""
    for index, (words, row) in enumerate(zip(rows.dataset["words"], rows.dataset["tags"], strict=True)):
        place = rows.place(index)
        if words is None or row is None:
            raise UserError(f"{place} has no {'words' if words is None else 'tags'}; allowed: a list in every row")
        if len(words) != len(row):
            raise UserError(f"{place} has {len(words)} words and {len(row)} tags; allowed: a tag for each word")
        if not words:
            raise UserError(f"{place} has no words; allowed: one or more in every row")
        if None in words:
            raise UserError(f"{place}: word {words.index(None) + 1} is missing; allowed: a text for each word")
