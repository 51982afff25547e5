"""Several labels a word: lists of labels in the list of a row's tags, or text with a separator between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import label_sets, labels
from hf_mps.finetune.data.label_sets import LabelSets
from hf_mps.finetune.text import word_labels
from hf_mps.finetune.text.padding import IGNORED
from hf_mps.finetune.text.tokens import TEXT
from hf_mps.metrics import seqeval

if TYPE_CHECKING:
    from hf_mps.finetune.data.load import Rows

UNSAID = ("", "_", seqeval.OUTSIDE)
"""What text says of a word without a label: nothing, CoNLL-U's underscore, or the O of names."""


@dataclass(frozen=True)
class WordSets:
    """`sets` are the labels, of which a word has any number; `classes` are the names of ids, with O where it is one.

    `separator` stands between the labels of a text. O is no label of its own: it says that a word has none.
    """

    sets: LabelSets
    classes: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The labels in the order of their ids."""
        return self.sets.names

    def reader(self, rows: Rows) -> Callable[[Any], list[str]]:
        """Return what tells the labels of one word of `rows` as text, from what its column holds."""
        own = tuple(getattr(_innermost(rows), "names", None) or ())
        names = own or (() if _are_text(rows) else self.classes)
        # Labels that were found are called by their numbers: those are names, and no places in a list.
        named = not own and all(name.isdecimal() for name in names)

        def read(raw: Any) -> list[str]:
            if isinstance(raw, str):
                parts = [part.strip() for part in raw.split(self.separator)]
                return [] if raw.strip() in UNSAID else [part for part in parts if part != seqeval.OUTSIDE]
            texts = [labels.key(one) for one in raw]
            if not named:
                texts = [names[int(text)] if text.isdecimal() and int(text) < len(names) else text for text in texts]
            return [text for text in texts if text != seqeval.OUTSIDE]

        return read

    def encode(self, several: Sequence[str]) -> list[int]:
        """Return 1 for each label that a word has, as `reader` tells them, and 0 for the others."""
        ids = {self.sets.keys[one] for one in several}
        return [int(number in ids) for number in range(len(self.names))]


def asked(rows: Rows, separator: str | None, problem_type: labels.ProblemType | None) -> bool:
    """Whether words have several labels: by the recipe's word, or because a word's tags are a list."""
    if problem_type is not None:
        return problem_type == label_sets.PROBLEM
    return separator is not None or _inner(_inner(rows.dataset.features["tags"])) is not None


def decide(
    train: Rows, others: Iterable[Rows], named_in_recipe: Sequence[str] | None = None, separator: str | None = None
) -> WordSets:
    """Return the labels that words have: named by the recipe or the data set, or found in the training rows.

    Raises UserError, naming file, row and label, for rows whose words and tags differ in number, for a missing word or
    list of labels, and for a label outside the set.
    """
    splits = (train, *others)
    for rows in splits:
        word_labels.refuse_other_than_lists(rows)
        _refuse_other_types(rows, separator)
        word_labels.refuse_uneven(rows)
    of_data = getattr(_innermost(train), "names", None)
    classes = tuple(named_in_recipe or of_data or ())
    empty = WordSets(LabelSets((), {}, ""), classes, separator)
    named = [name for name in classes if name != seqeval.OUTSIDE]
    first, *rest = (_by_word(rows, empty.reader(rows)) for rows in splits)
    found = label_sets.decide(first, rest, named_in_recipe=named or None)
    if named and not named_in_recipe:
        found = replace(found, reason=labels.NAMED)
    return WordSets(found, classes, separator)


def kept(config: Any) -> WordSets | None:
    """Return the labels that a saved model's configuration names; None where its words have one tag each."""
    found = label_sets.kept(config)
    return None if found is None else WordSets(found)


def described(found: WordSets, table: Any = None) -> dict[str, Choice[Any]]:
    """Return the labels in words, and the doubts; `table`, (words, labels) of 0 and 1, tells how many a word has."""
    mean = "" if table is None else f", {table.sum() / max(1, len(table)):.2f} a word"
    said = f"{len(found.names)}{mean}: {labels.listed(found.names)}"
    doubts = labels.doubted("tags", found.sets.doubts)
    return {"tags": Choice(said, f"several a word; {found.sets.reason}"), **doubts}


@dataclass
class Collator:
    """Pads rows by `inner`, and their labels, (tokens, `width`) of each, to a float32 tensor (rows, tokens, `width`).

    Rows of IGNORED fill it up: what stands there is neither learned nor measured.
    """

    inner: Callable[[list[Any]], Any]
    width: int
    side: str = "right"

    def __call__(self, rows: list[Any]) -> Any:
        import numpy
        import torch

        batch = self.inner([{name: value for name, value in row.items() if name != "labels"} for row in rows])
        if "labels" not in rows[0]:
            return batch
        wide = batch["input_ids"].shape[1]
        table = numpy.full((len(rows), wide, self.width), IGNORED, dtype=numpy.float32)
        for at, row in enumerate(rows):
            count = len(row["labels"])
            table[at, slice(count) if self.side == "right" else slice(wide - count, wide)] = row["labels"]
        batch["labels"] = torch.from_numpy(table)
        return batch


def _by_word(rows: Rows, read: Callable[[Any], list[str]]) -> Rows:
    """Return a row for each word with its labels as text, under the number of its row."""
    from datasets import Dataset, Features, List, Value

    found: list[list[str]] = []
    numbers: list[int] = []
    for index, row in enumerate(rows.dataset["tags"]):
        if None in row:
            told = f"{rows.where}: row {rows.number(index)}: word {row.index(None) + 1} has no labels"
            raise UserError(f"{told}; allowed: a list for each word, an empty one for none")
        found += map(read, row)
        numbers += [rows.number(index) - 1] * len(row)
    dataset = Dataset.from_dict({"label": found}, features=Features({"label": List(Value("string"))}))
    return replace(rows, dataset=dataset, numbers=tuple(numbers))


def _refuse_other_types(rows: Rows, separator: str | None) -> None:
    """Raise UserError where words have neither lists of labels nor, with a separator, text."""
    kind = rows.dataset.features["tags"]
    inner = _inner(kind)
    lists = _inner(inner) is not None
    if lists and separator is not None:
        raise UserError(f"{rows.where}: data.separator is for labels in a text, and these are lists; leave it out")
    if not lists and getattr(inner, "dtype", None) in TEXT and separator is None:
        raise UserError(
            f"{rows.where}: the tags are a text for each word, and several labels stand in a list for each or between"
            " separators; next: data.separator='|'"
        )
    if not lists and (separator is None or getattr(inner, "dtype", None) not in TEXT):
        allowed = "a list of labels for each word" if separator is None else "a text for each word"
        raise UserError(f"{rows.where}: data.columns.tags names a column of {kind}; allowed: {allowed}")


def _inner(feature: Any) -> Any:
    """The type of what a list holds; None for what is no list."""
    return getattr(feature, "feature", None)


def _innermost(rows: Rows) -> Any:
    inner = _inner(rows.dataset.features["tags"])
    return _inner(inner) or inner


def _are_text(rows: Rows) -> bool:
    return getattr(_innermost(rows), "dtype", None) in TEXT
