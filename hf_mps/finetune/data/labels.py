"""The meaning of the label column: classes by integer or by name, a number to predict, or several labels a row.

Several are lists of names or ids, text with a separator, or a column of 0 and 1 for each label.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import schema

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
Order = Callable[[set[str]], list[str]]
"""Puts the classes of rows into an order that does not depend on that of the rows."""
SHOWN = 12
# float32's largest: the loss is computed in it, and a larger label makes it infinite.
LARGEST = 3.4028234e38
# A thousand steps of AdamW at a rate of 2e-5 move the answer of a head over some hundred features about so far.
FAR = 100
# What programs write for a missing value. R's NA is one, and Python's None; `none` in small letters is a word. Tags of
# -100 are those of tokens that a loss passes over.
GAPS = ("-100", "nan", "NaN", "NAN", "null", "NULL", "Null", "None", "NA", "N/A", "n/a", "#N/A", "<NA>")
# Begins the reason where the training rows determine the labels.
FOUND = "found in"
# The reason where the data set itself names its classes.
NAMED = "the data set names them"
# Configuration keys that are counts (layers, heads, dimensions), and those that are probabilities.
COUNT = re.compile(r"(^|_)(layers?|heads?|groups?|size|dim|embd|positions)$|^d_(model|ff|kv)$")
PROBABILITY = re.compile(r"dropout|_prob$|_pdrop$")


class Overridden(schema.Recipe):
    """Adds `config_overrides` for the model's configuration."""

    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's configuration."""


@dataclass(frozen=True)
class Labels:
    """`names` are the classes in the order of their ids, empty for regression; `reason` says how they were found.

    `keys` maps what a row may hold to its class id: the text of the raw value, see `key`. `doubts` are what a person
    should check, though it can be trained on.
    """

    names: tuple[str, ...]
    keys: dict[str, int]
    reason: str
    doubts: tuple[str, ...] = ()

    @property
    def problem_type(self) -> ProblemType:
        """transformers' name for the problem."""
        return "single_label_classification" if self.names else "regression"

    def raw(self, batch: Mapping[str, list[Any]]) -> list[Any]:
        """Return what each row of a batch holds."""
        return batch["label"]

    def known(self, raw: Any) -> bool:
        """Return whether `encode` takes a raw label."""
        return key(raw) in self.keys if self.names else abs(number(raw)) <= LARGEST

    def encode(self, raw: Any) -> int | float:
        """Return the class id of a raw label, or its number for regression. The label must have passed `decide`."""
        return self.keys[key(raw)] if self.names else float(raw)


def key(raw: Any) -> str:
    """Return a raw label as text, so that 1, 1.0, "1" and " 1" of different files are one label; empty for a gap.

    Letters are in Unicode's form NFC: é of one code point and e with an accent behind it are the same text.
    """
    if raw is None or (isinstance(raw, float) and math.isnan(raw)):
        return ""
    if isinstance(raw, float) and raw.is_integer():
        return str(int(raw))
    text = str(raw).strip()
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def number(raw: Any) -> float:
    """Return the number that a raw value is; NaN where it is none."""
    try:
        return float(raw)
    except (TypeError, ValueError):
        return math.nan


def keys(classes: Sequence[str], seen: Collection[str], *, ids: bool = False) -> dict[str, int]:
    """Return the id of each text that rows may hold for `classes`: names, or ids where no row (`seen`) holds a name."""
    by_name = {key(name): number for number, name in enumerate(classes)}
    return {str(number): number for number in range(len(classes))} if ids or not by_name.keys() & seen else by_name


def of_column(
    train: Rows, column: Any, in_recipe: Sequence[str] | None, seen: set[str], order: Order, *, numbers: bool = False
) -> Labels:
    """Return the classes that the recipe names, or else the data set in the type of the `column`, or those of the
    training rows (`seen`, as `key` has them) in `order`.

    With `numbers` rows hold the ids of named classes, as they do where the data set names them.
    """
    in_data = getattr(column, "names", None)
    given = in_recipe or in_data
    classes = given or order(seen - {""})
    reason = "data.labels in the recipe" if in_recipe else NAMED if in_data else f"{FOUND} {train.where}"
    return Labels(tuple(classes), keys(classes, seen, ids=bool(given) and (numbers or in_data is not None)), reason)


def decide(
    train: Rows, others: Iterable[Rows], in_recipe: Sequence[str] | None = None, problem_type: ProblemType | None = None
) -> Labels:
    """Return what column `label` of every split means; the training rows say which labels there are.

    `in_recipe` are class names in the order of their ids. Raises UserError, naming file, row and label, for a row
    without a label, for a label outside the set, and for fewer than two classes.
    """
    splits = (train, *others)
    named = getattr(train.dataset.features["label"], "names", None)
    for rows in splits[1:]:
        names = getattr(rows.dataset.features["label"], "names", None)
        if names is not None and named is not None and names != named:
            told = f"its classes are {', '.join(names)}, and those of {train.where} {', '.join(named)}"
            raise UserError(f"{rows.where}: {told}; allowed: the same in the same order")
    seen = _distinct(train)
    measured = problem_type is None and not (in_recipe or named) and _numbers(train, seen)
    if problem_type == "regression" or measured:
        why = "problem_type in the recipe" if problem_type else "the labels are numbers with a decimal point"
        for rows in splits:
            _refuse_first(rows, lambda raw: not _is_number(raw), "is not a finite number, as regression needs")
            told = f"is beyond {LARGEST:.1e}, the largest number of float32; next: labels of another unit"
            _refuse_first(rows, lambda raw: abs(float(raw)) > LARGEST, told)
        if (most := max(abs(float(raw)) for raw in seen)) > FAR:
            told = f"{train.where}: labels reach {most:.3g}, and answers begin near 0: few trainings get that far"
            notices.warn_user(f"{told}; next: a column in another unit, such as (label - mean) / standard deviation")
        whole = problem_type is None and all(float(raw).is_integer() for raw in seen)
        few = f"every label is a whole number ({listed([f'{raw}' for raw in seen])})"
        doubt = f"{few}, and taken for a measure; problem_type=single_label_classification takes them for classes"
        return Labels((), {}, why, (doubt,) if whole else ())
    labels = of_column(train, train.dataset.features["label"], in_recipe, {key(raw) for raw in seen}, in_order)
    found = labels.reason.startswith(FOUND)
    if found and SHOWN < len(labels.names) == len(train.dataset):
        way_on = "give the column of classes with data.columns.label"
        if all(map(_is_number, seen)):
            way_on += ", or problem_type=regression for a measure"
        raise UserError(f"{train.where}: each of its {len(labels.names)} rows has another label; next: {way_on}")
    way_on = "; next: correct it" + (", or name every class in data.labels" if found else "")
    outside = f"is not in the label set ({listed(labels.names)}), {labels.reason}"
    for rows in splits:
        _refuse_first(rows, lambda raw: key(raw) not in labels.keys, outside, labels.names, way_on)
    if len(labels.names) < 2:
        told = f"each row has the label '{brief(labels.names[0])}'"
        raise UserError(f"{train.where}: {told}; allowed: two labels or more")
    counts = Counter(labels.keys[key(raw)] for raw in train.dataset["label"])
    alone = [labels.names[number] for number, count in sorted(counts.items()) if count == 1]
    lonely = []
    if alone and len(train.dataset) > 2 * len(counts):  # else it is a handful of rows in all
        lonely = [f"one training row alone has the class {listed(alone)}"]
    return replace(labels, doubts=(*doubts(labels.names, seen), *lonely))


def classes(config: Any) -> tuple[str, ...]:
    """Return the classes that a saved model's configuration names, in the order of their ids."""
    return tuple(str(config.id2label[number]) for number in range(config.num_labels))


def kept(config: Any) -> Labels:
    """Return the classes that a saved model's configuration names, in the order of their ids; none for one number a
    row, `LabelSets` where a row has several.
    """
    several = config.problem_type == MULTI_LABEL
    if not several and (config.problem_type == "regression" or config.num_labels == 1):
        return Labels((), {}, "the model's configuration has one number a row")
    names = classes(config)
    kind = LabelSets if several else Labels
    return kind(names, keys(names, {key(name) for name in names}), "the model's configuration")


def choices(labels: Labels, train: Rows) -> dict[str, Choice[str]]:
    """Return the labels in words, with how they were found, and the doubts where there are any, for a header.

    Of several labels it says how many a row of `train` has.
    """
    told, reason = "regression", labels.reason
    if isinstance(labels, LabelSets):
        mean = sum(_set_counts(train, labels)) / len(train.dataset)
        told, reason = f"{len(labels.names)}, {mean:.2f} a row: {listed(labels.names)}", f"several a row; {reason}"
    elif labels.names:
        told = f"{len(labels.names)} classes: {listed(labels.names)}"
    return {"labels": Choice(told, reason), **doubted("labels", labels.doubts)}


def doubted(what: str, doubts_found: Sequence[str]) -> dict[str, Choice[str]]:
    """Return the doubts about labels or tags as a separate choice, so that a header shows them."""
    reason = "the rows are trained on as they are"
    return {f"{what}_to_check": Choice("; ".join(doubts_found), reason)} if doubts_found else {}


def doubts(names: Sequence[str], seen: Iterable[Any] = ()) -> tuple[str, ...]:
    """Return what looks like a slip in a set of classes, and in the raw labels `seen`: names that differ in case,
    spaces or invisible characters alone, words for a gap, and one name in two forms of Unicode.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        # Zero-width spaces, joiners and byte order marks are of the category Cf; here they are shown by their codes.
        bare = "".join(one for one in name if unicodedata.category(one) != "Cf" and not one.isspace())
        shown = "".join(ascii(one)[1:-1] if unicodedata.category(one) == "Cf" else one for one in name)
        alike.setdefault(unicodedata.normalize("NFC", bare).casefold(), []).append(shown)
    told = "differ in case, spaces or invisible characters alone"
    slips = [f"{' and '.join(same)} {told}" for same in alike.values() if len(same) > 1]
    forms = Counter(key(text) for text in {raw.strip() for raw in seen if isinstance(raw, str)})
    slips += [f"'{name}' is written in two forms of Unicode, which are one class" for name in forms if forms[name] > 1]
    return (*slips, *(f"'{name}' is a class, and often means a gap" for name in names if name in GAPS))


def listed(names: Sequence[str]) -> str:
    """Return the names in one line; of many only the first, and their number."""
    return ", ".join(map(brief, names[:SHOWN])) + (f", … {len(names)} in all" if len(names) > SHOWN else "")


def configure(config: Any, names: Sequence[str], overrides: Mapping[str, Any] | None = None) -> Any:
    """Set the classes `names` (none: one number a row) and a recipe's `config_overrides` in a model's configuration.

    Raises UserError for an override that is no key of the configuration.
    """
    override(config, overrides or {})
    config.num_labels = len(names) or 1
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    return config


def override(config: Any, overrides: Mapping[str, Any]) -> None:
    """Set a recipe's `config_overrides` in a model's configuration.

    Raises UserError for unknown keys, for a value of another type than the key has, and for one below its least.
    """
    known = config.to_dict()
    for name, value in overrides.items():
        if name not in known:
            raise UserError(f"config_overrides.{name} is no key of {type(config).__name__}{nearest(name, known)}")
        if allowed := _other_than(name, known[name], value):
            raise UserError(f"config_overrides.{name} is {value!r}; allowed: {allowed}")
        setattr(config, name, value)


def _other_than(name: str, now: Any, value: Any) -> str:
    """Return what is allowed instead of `value` for a key that is `now`; empty where `value` is allowed or nobody
    knows.
    """
    if isinstance(now, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(now, (int, float)) and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return "" if value is None else "a number"
    if isinstance(now, int) and now > 0 and COUNT.search(name):  # an id of a token may be 0, or -1 for none
        return "" if isinstance(value, int) and value >= 1 else "an integer of 1 or more"
    if isinstance(now, str):
        return "" if isinstance(value, str) or value is None else "text"
    if isinstance(now, float) and PROBABILITY.search(name):
        return "" if 0 <= value <= 1 else "0 to 1"
    return ""


def _numbers(train: Rows, seen: Sequence[Any]) -> bool:
    """Return whether the labels are floats; in a csv, where all is text, numbers of which one is no integer."""
    if not train.textual:
        return str(getattr(train.dataset.features["label"], "dtype", "")).startswith(("float", "decimal"))
    values = [raw for raw in seen if key(raw)]
    return bool(values) and all(_is_number(raw) for raw in values) and not all(_is_integer(raw) for raw in values)


def _refuse_first(rows: Rows, wrong: Any, problem: str, names: Sequence[str] = (), way_on: str = "") -> None:
    """Raise UserError for the first row with a wrong label; the few distinct labels are checked first."""
    # By their text: NaN is not equal to itself.
    bad = {repr(raw) for raw in _distinct(rows) if wrong(raw)}
    if not bad:
        return
    for index, raw in enumerate(rows.dataset["label"]):
        if repr(raw) not in bad:
            continue
        place = rows.place(index)
        # Test splits of the hub, such as GLUE's, have -1 for labels that are kept back.
        if raw == -1 or key(raw) == "":
            raise UserError(f"{place} has no label; allowed: a label in every row")
        raise UserError(f"{place}: label '{brief(str(raw))}' {problem}{nearest(key(raw), names)}{way_on}")


def _distinct(rows: Rows) -> list[Any]:
    feature = rows.dataset.features["label"]
    if not isinstance(getattr(feature, "dtype", None), str) or feature.dtype in ("list", "dict"):
        raise UserError(f"{rows.where}: the label column holds {feature}; allowed: integers, text or floats")
    return list(rows.dataset.unique("label"))


def in_order(keys: set[str]) -> list[str]:
    """Sort numbers by size and names by alphabet, so that ids do not depend on the order of the rows."""
    return sorted(keys, key=lambda name: (0, float(name), name) if _is_integer(name) else (1, 0, name))


def _is_integer(raw: Any) -> bool:
    text = str(raw).strip()
    return (text[1:] if text[:1] in "+-" else text).isdecimal()


def _is_number(raw: Any) -> bool:
    return not isinstance(raw, bool) and math.isfinite(number(raw))


MULTI_LABEL: ProblemType = "multi_label_classification"
# The name of a role whose label has a separate column; the label's number follows.
LABEL_COLUMN = "label_"
FLAGS: dict[str, float] = {"0": 0.0, "1": 1.0, "False": 0.0, "True": 1.0, "false": 0.0, "true": 1.0}


@dataclass(frozen=True)
class LabelSets(Labels):
    """`names` are the labels in the order of their ids; a row has any number of them, or none.

    `separator` separates the labels of a text. Of `columns` each holds 0 or 1 for one label.
    """

    separator: str | None = None
    columns: tuple[str, ...] = ()

    @property
    def problem_type(self) -> ProblemType:
        return MULTI_LABEL

    def raw(self, batch: Mapping[str, list[Any]]) -> list[Any]:
        """Return what each row of a batch holds: the value of its one column, or a tuple of its columns' values."""
        return list(zip(*(batch[column] for column in self.columns), strict=True)) if self.columns else batch["label"]

    def keys_of(self, raw: Any) -> list[str]:
        """The labels of one row as text, as `keys` has them; of columns what each holds. An empty one is a gap."""
        if isinstance(raw, str):
            return [key(part) for part in raw.split(self.separator)] if raw.strip() else []
        return [key(one) for one in raw]

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


def has_sets(rows: Rows, separator: str | None, problem_type: ProblemType | None) -> bool:
    """Return whether the rows have several labels: by the recipe's word, or because their label is a list."""
    if problem_type is not None:
        return problem_type == MULTI_LABEL
    return separator is not None or f"{LABEL_COLUMN}0" in rows.dataset.features or _inner_type(rows) is not None


def decide_sets(
    train: Rows, others: Iterable[Rows], named: Sequence[str] | None, columns: Sequence[str], separator: str | None
) -> LabelSets:
    """Return what the labels of every split mean; the training rows say which there are unless somebody names them.

    `columns` are the names of the columns of 0 and 1, `named` those of labels in the recipe, in the order of their ids.
    Raises UserError, naming file, row and label, for a gap, for a label outside the set, and for fewer than two.
    """
    splits = (train, *others)
    for rows in splits if not columns else ():
        feature = rows.dataset.features["label"]
        is_text = str(getattr(feature, "dtype", "")) in ("string", "large_string")
        if is_text and separator is None:
            told = "several labels are a list, columns of 0 and 1 (data.columns.label=[a, b]), or text with separators"
            raise UserError(f"{rows.where}: the label column holds text; {told}; next: data.separator=','")
        if not is_text and _inner_type(rows) is None:
            raise UserError(f"{rows.where}: the label column holds {feature}; allowed: a list of labels in each row")
        if not is_text and separator is not None:
            raise UserError(f"{rows.where}: data.separator is for labels in a text, and these are lists; leave it out")
    found = LabelSets((), {}, "each has a column of 0 and 1", separator=separator)
    if columns:
        roles = tuple(f"{LABEL_COLUMN}{number}" for number in range(len(columns)))
        found = replace(found, names=tuple(columns), columns=roles)
    else:
        seen = {one for raw in train.dataset["label"] if raw is not None for one in found.keys_of(raw)}
        whole = of_column(train, _inner_type(train), named, seen, in_order)
        if len(whole.names) == 1 and whole.reason.startswith(FOUND):
            raise UserError(f"{train.where}: the only label is '{brief(whole.names[0])}'; allowed: two labels or more")
        found = replace(found, names=whole.names, keys=whole.keys, reason=whole.reason)
    for rows in splits:
        for index, raw in enumerate(_raw_sets(rows, found)):
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
            told = f"label '{brief(wrong)}' is not in the label set ({listed(found.names)}), {found.reason}"
            raise UserError(f"{place}: {told}{nearest(wrong, found.names) or '; next: correct it'}")
    counts = _set_counts(train, found)
    if not any(counts):
        raise UserError(f"{train.where}: no row has any label; allowed: labels in some of the training rows")
    unused = [name for name, count in zip(found.names, counts, strict=True) if not count]
    doubtful = [*doubts(found.names), *([f"no training row has {listed(unused)}"] if unused else [])]
    return replace(found, doubts=tuple(doubtful))


def _inner_type(rows: Rows) -> Any:
    """Return the type of the labels inside the lists of a split; None where its label is no list."""
    return getattr(rows.dataset.features.get("label"), "feature", None)


def _set_counts(rows: Rows, found: LabelSets) -> list[float]:
    """Return how many rows have each label."""
    return [sum(column) for column in zip(*map(found.encode, _raw_sets(rows, found)), strict=True)]


def _raw_sets(rows: Rows, found: LabelSets) -> list[Any]:
    return found.raw({column: rows.dataset[column][:] for column in found.columns or ("label",)})
