"""What people type and hand over by mistake: one line says what came, what is allowed, and a command that works.

The cases are drawn; each runs below the command, so that hundreds take seconds. `make nightly` draws thousands anew.
"""

from __future__ import annotations

import gzip
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mps.cli.main import app
from hf_mps.core.errors import UserError
from hf_mps.finetune import tasks
from hf_mps.finetune.data import label_sets, labels, load
from hf_mps.finetune.recipe import catalogue, keys, overrides
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.tasks import text_classification
from tests.finetune import strategies
from tests.finetune.strategies import cases

RECIPES = [entry.name for entry in catalogue.entries()]
KEYS = {task: [key.name for key in keys.of_recipe(task)] for task in tasks.names()}
SECTIONS = {name.partition(".")[0] for names in KEYS.values() for name in names}
TASK_OF = {name: str(yaml.safe_load(catalogue.find(name).path.read_text())["task"]) for name in RECIPES}
REMEDIES = ("allowed: ", "next: ", "next, ", "did you mean", "give ", "leave ", "in its place", "write it", "add it")
WRONG = ["", "no", "-1", "0", "1e99", "99999999999999999999", "[]", "[a, b]", "{a: 1}", "true", "nan", "é\u200b", "a b"]
HUNDREDS = cases(150)
THOUSANDS = settings(max_examples=3000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
COMMAND: Any = typer.main.get_command(app)


def complaint(error: UserError, *came: str) -> None:
    """Fail unless the error is one line that names one of `came`, what is allowed, and commands that work."""
    line = str(error)
    assert "\n" not in line
    assert len(line) < 2500, line
    assert not came or any(word in line for word in came), (came, line)
    assert any(words in line for words in REMEDIES), line
    for said in re.findall(r"next(?:, [^:;]*)?: ([^;]+)", line):
        works(said.strip())


def works(said: str) -> None:
    """Fail for a command of hf-mps that its parser refuses, and for an override that no recipe has."""
    words = shlex.split(said.partition(", or ")[0], posix=False)
    if words[:1] == ["hf-mps"]:
        with COMMAND.make_context("hf-mps", words[1:]) as group:
            name, command, rest = COMMAND.resolve_command(group, words[1:])
            while hasattr(command, "resolve_command"):
                name, command, rest = command.resolve_command(group, rest)
            command.make_context(name, rest, parent=group)
    elif words and re.fullmatch(r"[a-z_.]+=.*", words[0]):
        (key,) = overrides.parse(words[:1], "text-classification")
        assert key.partition(".")[0] in SECTIONS, said


def one_recipe(drawn: tuple[str, int, str, str]) -> None:
    """Load a recipe with a wrong value for one of its keys, or with a key mistyped."""
    recipe, place, slip, value = drawn
    names = KEYS[TASK_OF[recipe]]
    key = names[place % len(names)]
    if slip:
        at = place % len(key)
        key = key[:at] + slip + key[at + 1 :]
    try:
        load_recipe(recipe, [f"{key}={value}"])
    except UserError as error:
        complaint(error, key, key.rpartition(".")[2], key.partition(".")[0])


RECIPE = st.tuples(
    st.sampled_from(RECIPES),
    st.integers(0, 10_000),
    st.sampled_from(["", "", "x", "_", ".", "é"]),
    st.sampled_from(WRONG) | strategies.texts,
)
FILES = st.one_of(
    strategies.tables().map(lambda table: ("csv", table.content)),
    strategies.tables().map(lambda table: ("tsv", table.content)),
    strategies.documents().map(lambda document: (document[0][1:], document[1])),
    st.tuples(st.sampled_from(["csv", "jsonl", "json", "txt", "parquet", "xlsx", "conll"]), st.binary(max_size=40)),
    st.sampled_from(
        [
            ("csv", b"text|label\na|b\nc|d\n"),
            ("tsv", b"text,label\na,b\nc,d\n"),
            ("csv", b"text:label\na:b\n"),
            ("csv", b"text,label\n"),
            ("json", b"[]"),
            ("json", b"{}"),
            ("jsonl", b"[]\n"),
            ("jsonl", b'{"text": "a", "label": 123456789012345678901234567890}\n'),
            ("csv", "text,label\né,1\n".encode("utf-16")),
            ("csv", b"\0\0\0\0"),
            ("parquet", b"PAR1PAR1"),
        ]
    ),
)


def one_file(folder: Path, drawn: tuple[tuple[str, bytes], list[str], bool, bool, bool]) -> None:
    """Read a drawn file as the rows of a classifier, as far as its labels."""
    (ending, content), columns, header, packed, streamed = drawn
    name = str(folder / f"a.{ending}{'.gz' if packed else ''}")
    Path(name).write_bytes(gzip.compress(content) if packed else content)
    said: dict[str, Any] = {
        "files": {"train": name},
        "hold_out": 0.5,
        "columns": dict(zip(("text", "label"), columns, strict=True)),
    }
    said |= {"header": header, "streaming": streamed}
    try:
        data = text_classification.Data.model_validate(said)
    except ValueError:
        return
    try:
        load.check(data)
        rows = load.load(data, seed=1)
        decide = label_sets.decide if label_sets.asked(rows["train"], None, None) else labels.decide
        decide(rows["train"], [rows["validation"]])
    except UserError as error:
        complaint(error, name)


def file_cases() -> st.SearchStrategy[Any]:
    pairs = st.lists(st.sampled_from(["text", "label", "a", "b", "0", "1"]) | strategies.names, min_size=2, max_size=2)
    return st.tuples(FILES, pairs, st.booleans(), st.sampled_from([False, False, False, True]), st.booleans())


@pytest.fixture
def place(own_cache: Path, tmp_path: Path) -> Path:
    return tmp_path


@HUNDREDS
@given(drawn=RECIPE)
def test_a_wrong_value_or_key_is_refused_with_what_is_allowed(drawn: Any) -> None:
    one_recipe(drawn)


@HUNDREDS
@given(drawn=file_cases())
def test_a_bad_file_is_refused_with_what_is_allowed(place: Path, drawn: Any) -> None:
    one_file(place, drawn)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("part", ["recipes", "files"])
def test_thousands_more(place: Path, part: str) -> None:
    run: Callable[[Any], None] = one_recipe if part == "recipes" else lambda drawn: one_file(place, drawn)
    THOUSANDS(given(RECIPE if part == "recipes" else file_cases())(run))()
