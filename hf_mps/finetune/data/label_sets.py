"""Several labels a row: lists of names or ids, text with a separator, or a column of 0 and 1 for each label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.load import Rows

PROBLEM: labels.ProblemType = "multi_label_classification"
# The name of a role whose label has a separate column; the label's number follows.
COLUMN = "label_"
FLAGS: dict[str, float] = {"0": 0.0, "1": 1.0, "False": 0.0, "True": 1.0, "false": 0.0, "true": 1.0}


@dataclass(frozen=True)
class LabelSets(labels.Labels):
    """`names` are the labels in the order of their ids; a row has any number of them, or none.

    `separator` separates the labels of a text. Of `columns` each holds 0 or 1 for one label.
    """

    separator: str | None = None
    columns: tuple[str, ...] = ()

    @property
    def problem_type(self) -> labels.ProblemType:
        return PROBLEM

    def raw(self, batch: Mapping[str, list[Any]]) -> list[Any]:
        """Return what each row of a batch holds: the value of its one column, or a tuple of its columns' values."""
        return list(zip(*(batch[column] for column in self.columns), strict=True)) if self.columns else batch["label"]

    def keys_of(self, raw: Any) -> list[str]:
        """The labels of one row as text, as `keys` has them; of columns what each holds. An empty one is a gap."""
        if isinstance(raw, str):
            return [labels.key(part) for part in raw.split(self.separator)] if raw.strip() else []
        return [labels.key(one) for one in raw]

    def known(self, raw: Any) -> bool:
        """Return whether `encode` takes what a row holds."""
        return raw is not None and all(one in (FLAGS if self.columns else self.keys) for one in self.keys_of(raw))

    def encode(self, raw: Any) -> list[float]:  # type: ignore[override]
        """Return 1.0 for each label that the row has and 0.0 for the others, in the order of `names`."""
        given = self.keys_of(raw)
        if self.columns:
            return [FLAGS[one] for one in given]
        ids = {self.keys[one] for one in given}
        return [float(number in ids) for number in range(len(self.names))]


def asked(rows: Rows, separator: str | None, problem_type: labels.ProblemType | None) -> bool:
    """Return whether the rows have several labels: by the recipe's word, or because their label is a list."""
    if problem_type is not None:
        return problem_type == PROBLEM
    return separator is not None or f"{COLUMN}0" in rows.dataset.features or _inner(rows) is not None


def decide(
    train: Rows,
    others: Iterable[Rows],
    named_in_recipe: Sequence[str] | None = None,
    *,
    columns: Sequence[str] = (),
    separator: str | None = None,
) -> LabelSets:
    """Return what the labels of every split mean; the training rows say which there are unless somebody names them.

    `columns` are the names of the columns of 0 and 1, `named_in_recipe` those of labels in the order of their ids.
    Raises UserError, naming file, row and label, for a gap, for a label outside the set, and for fewer than two.
    """
    splits = (train, *others)
    for rows in splits if not columns else ():
        feature = rows.dataset.features["label"]
        is_text = str(getattr(feature, "dtype", "")) in ("string", "large_string")
        if is_text and separator is None:
            told = "several labels are a list, columns of 0 and 1 (data.columns.label=[a, b]), or text with separators"
            raise UserError(f"{rows.where}: the label column holds text; {told}; next: data.separator=','")
        if not is_text and _inner(rows) is None:
            raise UserError(f"{rows.where}: the label column holds {feature}; allowed: a list of labels in each row")
        if not is_text and separator is not None:
            raise UserError(f"{rows.where}: data.separator is for labels in a text, and these are lists; leave it out")
    found = LabelSets((), {}, "each has a column of 0 and 1", separator=separator)
    if columns:
        roles = tuple(f"{COLUMN}{number}" for number in range(len(columns)))
        found = replace(found, names=tuple(columns), columns=roles)
    else:
        seen = {one for raw in train.dataset["label"] if raw is not None for one in found.keys_of(raw)}
        named = labels.of_column(train, _inner(train), named_in_recipe, seen, labels.in_order)
        if len(named.names) == 1 and named.reason.startswith(labels.FOUND):
            raise UserError(f"{train.where}: the only label is '{brief(named.names[0])}'; allowed: two labels or more")
        found = replace(found, names=named.names, keys=named.keys, reason=named.reason)
    for rows in splits:
        for index, raw in enumerate(_all(rows, found)):
            if found.known(raw):
                continue
            place = rows.place(index)
            if raw is None:
                raise UserError(f"{place} has no labels; allowed: a list in every row, an empty one for none")
            wrong = next(one for one in found.keys_of(raw) if one not in (FLAGS if found.columns else found.keys))
            if found.columns:
                column = found.names[found.keys_of(raw).index(wrong)]
                raise UserError(f"{place}: column '{brief(column)}' holds '{brief(wrong)}'; allowed: 0 or 1")
            if wrong == "":
                raise UserError(f"{place} has an empty label among its own; allowed: a name for each")
            told = f"label '{brief(wrong)}' is not in the label set ({labels.listed(found.names)}), {found.reason}"
            raise UserError(f"{place}: {told}{nearest(wrong, found.names) or '; next: correct it'}")
    counts = _counts(train, found)
    if not any(counts):
        raise UserError(f"{train.where}: no row has any label; allowed: labels in some of the training rows")
    unused = [name for name, count in zip(found.names, counts, strict=True) if not count]
    doubts = [*labels.doubts(found.names), *([f"no training row has {labels.listed(unused)}"] if unused else [])]
    return replace(found, doubts=tuple(doubts))


def kept(config: Any) -> LabelSets | None:
    """Return the labels that a saved model's configuration names; None where its rows have a class or a number each."""
    if config.problem_type != PROBLEM:
        return None
    names = labels.classes(config)
    return LabelSets(names, labels.keys(names, {labels.key(name) for name in names}), "the model's configuration")


def described(found: LabelSets, train: Rows | None = None) -> dict[str, Choice[Any]]:
    """Return the labels in words, how many a row has in `train`, and the doubts, as a header shows them."""
    mean = f", {sum(_counts(train, found)) / len(train.dataset):.2f} a row" if train is not None else ""
    said = f"{len(found.names)}{mean}: {labels.listed(found.names)}"
    return {"labels": Choice(said, f"several a row; {found.reason}"), **labels.doubted("labels", found.doubts)}


def encoded(rows: Rows, found: LabelSets) -> list[list[float]]:
    """Return every row's labels as numbers of shape (rows, labels), in its order."""
    return [found.encode(raw) for raw in _all(rows, found)]


def _inner(rows: Rows) -> Any:
    """Return the type of the labels inside the lists of a split; None where its label is no list."""
    return getattr(rows.dataset.features.get("label"), "feature", None)


def _counts(rows: Rows, found: LabelSets) -> list[float]:
    """Return how many rows have each label."""
    return [sum(column) for column in zip(*encoded(rows, found), strict=True)]


def _all(rows: Rows, found: LabelSets) -> list[Any]:
    return found.raw({column: rows.dataset[column][:] for column in found.columns or ("label",)})
