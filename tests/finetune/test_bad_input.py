"""What people type and hand over by mistake: one line says what came, what is allowed, and a command that works.

The cases are drawn; each runs below the command, so that hundreds take seconds. `make nightly` draws thousands anew.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, load
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.stream.endless import Reader, TooManyBroken
from hf_mps.finetune.tasks import language_modeling, text_classification
from tests.finetune import strategies
from tests.finetune.strategies import cases
from tests.remedies import KEYS, complaint

RECIPES = [entry.name for entry in catalogue.entries()]
TASK_OF = {name: str(yaml.safe_load(catalogue.find(name).path.read_text())["task"]) for name in RECIPES}
WRONG = ["", "no", "-1", "0", "1e99", "99999999999999999999", "[]", "[a, b]", "{a: 1}", "true", "nan", "é\u200b", "a b"]
HUNDREDS = cases(80)
THOUSANDS = settings(max_examples=3000, deadline=None, database=None, suppress_health_check=list(HealthCheck))


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
    """Read a drawn file as the rows of a classifier, as far as its labels, or stream it as texts."""
    (ending, content), columns, header, packed, streamed = drawn
    name = str(folder / f"a.{ending}{'.gz' if packed else ''}")
    Path(name).write_bytes(gzip.compress(content) if packed else content)
    roles = dict(zip(("text",) if streamed else ("text", "label"), columns, strict=False))
    said: dict[str, Any] = {"files": {"train": name}, "hold_out": 0.5, "columns": roles, "header": header}
    try:
        data: Any = (language_modeling.Data if streamed else text_classification.Data).model_validate(
            {**said, "streaming": streamed}
        )
    except ValueError:
        return
    try:
        load.check(data)
        rows = load.load(data, seed=1)
        if (stream := rows["train"].stream) is not None:
            for row in islice(Reader(stream.reading, 0, 1), 20):
                assert isinstance(row["text"], str)
            return
        train, others = rows["train"], [rows["validation"]]
        if labels.has_sets(train, None, None):
            labels.decide_sets(train, others, None, (), None)
        else:
            labels.decide(train, others)
    except (UserError, TooManyBroken) as error:
        complaint(error, name)


def file_cases() -> st.SearchStrategy[Any]:
    pairs = st.lists(st.sampled_from(["text", "label", "a", "b", "0", "1"]) | strategies.names, min_size=2, max_size=2)
    rarely = st.sampled_from([False, False, False, True])
    return st.tuples(FILES, pairs, st.booleans(), rarely, st.booleans())


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
