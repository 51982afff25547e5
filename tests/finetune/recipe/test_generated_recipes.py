"""Recipes and overrides that nobody thought of: each is taken whole, or refused in one line that says where."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_mps.core.errors import BREAKING, UserError
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue, overrides, resolve, training_section
from hf_mps.finetune.recipe.overrides import read_yaml
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import checks
from tests.finetune.strategies import cases

RECIPES = [entry.name for entry in catalogue.entries()]
KNOWN = sorted({key.name for task in tasks.names() for key in resolve.keys_of_recipe(task)})
PLAIN: dict[str, Any] = {
    "task": "text-classification",
    "model": "some/model",
    "data": {"files": {"train": "train.csv", "validation": "dev.csv"}},
}

texts = st.text(max_size=30)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=True, allow_infinity=True),
    texts,
    st.sampled_from(
        ["", "null", "no", "1e5", "0x10", "1:30", "~", ".nan", "2e-5", "true", "a: b", "- a", "[", "{", "*x"]
    ),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
known_keys = st.sampled_from(KNOWN)
near_keys = st.tuples(known_keys, st.text(max_size=3)).map("".join)
dotted = st.lists(st.sampled_from(["data", "training", "lora", "columns", "rows", "", " ", "x", "1"]), max_size=5).map(
    ".".join
)


def one_line(error: UserError) -> str:
    text = str(error)
    assert text
    assert not any(category(letter) in BREAKING for letter in text), repr(text)
    assert len(text) < 4000
    return text


def at(values: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        values = values[part]
    return values


def arguments_name(key: str) -> str:
    """The key under the name that the installed TrainingArguments has for it."""
    section, dot, field = key.partition(".")
    return f"training.{next(iter(training_section.installed({field: None})))}" if dot and section == "training" else key


def numbered(column: Any) -> Any:
    """The name of a column, which is its number where a file has no names."""
    if isinstance(column, list):
        return [numbered(one) for one in column]
    return str(column) if type(column) is int else column


def taken_or_refused(name: str, words: list[str]) -> None:
    try:
        resolved = load_recipe(name, words)
    except UserError as error:
        one_line(error)
        return
    # Nothing is ignored or changed on the way: the recipe holds each value that was given, where it was given.
    said = overrides.lay(resolved.document, resolved.overrides)
    for key in said.overridden:
        given, taken = at(said.values, key), at(resolved.recipe.model_dump(), arguments_name(key))
        if isinstance(given, dict) and isinstance(taken, dict):  # a section, whose other keys have their defaults
            taken = {name: value for name, value in taken.items() if name in given}
        if key.startswith("data.columns."):
            given = numbered(given)
        assert given is None or taken in (given, [given]) or given != given, (key, given, taken)


@cases(300)
@given(name=st.sampled_from(RECIPES), key=known_keys | near_keys | dotted, value=values, flow=st.booleans())
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(name: str, key: str, value: Any, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True).strip() if flow else str(value)
    taken_or_refused(name, [f"{key}={text}"])


@cases(300)
@given(name=st.sampled_from(RECIPES), words=st.lists(st.text(max_size=60), max_size=3))
def test_any_words_behind_a_recipe_are_taken_or_refused_in_one_line(name: str, words: list[str]) -> None:
    taken_or_refused(name, words)


@cases(300)
@given(content=st.dictionaries(known_keys.map(lambda key: key.split(".")[0]) | texts, values, max_size=5))
def test_any_recipe_of_known_sections_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("generated") / "my.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, **content}, allow_unicode=True), encoding="utf-8")
    taken_or_refused(str(path), [])


@cases(300)
@given(
    name=st.sampled_from(RECIPES),
    cut=st.integers(0, 2000),
    put=st.binary(max_size=8)
    | st.sampled_from([b"\n", b"\t", b"  ", b"- ", b": ", b"&a ", b"*a", b"!!python/name:os.system", b"\0"]),
    drop=st.integers(0, 40),
)
def test_a_recipe_with_a_piece_lost_or_put_in_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, cut: int, put: bytes, drop: int
) -> None:
    text = catalogue.find(name).path.read_bytes()
    cut %= len(text)
    path = tmp_path_factory.mktemp("generated") / "my.yaml"
    path.write_bytes(text[:cut] + put + text[cut + drop :])
    taken_or_refused(str(path), [])
    with contextlib.suppress(UserError):
        read_yaml(Path(path), lenient=True)
    for line in map(str, checks.problems(str(path))):
        assert not any(category(letter) in BREAKING for letter in line), repr(line)
