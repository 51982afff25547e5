"""What people type behind predict, evaluate, export, push, bench and kernels: drawn, and each answered in a good line.

The verbs run in this process, on a tiny classifier whose files are damaged in one of two cases. `make nightly` draws
thousands anew.
"""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from hf_mps.cli.main import main
from hf_mps.core.errors import RunError, UserError
from hf_mps.tools.export.make import FORMATS
from tests.finetune import strategies, tiny
from tests.finetune.strategies import cases
from tests.finetune.test_bad_input import FILES, RECIPES, THOUSANDS, WRONG
from tests.metal.kernels.wheels import wheel
from tests.remedies import complaint

Words = list[str]
PLACES = [
    "new.csv",
    "new",
    "made",
    "made/x",
    "no/such/x.csv",
    "/proc/x",
    "/proc/x/y",
    "x" * 300,
    "",
    "a.CSV",
    "-",
    "~x",
]
DAMAGED = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
DAMAGE = st.one_of(st.none(), st.none(), st.just("gone"), st.just("folder"), strategies.DAMAGE)
VALUES = st.sampled_from([*WRONG, "1", "2", "csv", "f32", "q8", "text", "label"]) | strategies.texts


def joined(found: Iterable[Words]) -> Words:
    return [word for words in found for word in words]


def options(*names: str) -> st.SearchStrategy[Words]:
    """Up to two of these options with any value; what ends in * is a flag."""
    flags = [st.just([name[:-1]]) for name in names if name.endswith("*")]
    valued = [VALUES.map(lambda value, name=name: [name, value]) for name in names if not name.endswith("*")]
    return st.lists(st.one_of(*flags, *valued), max_size=2).map(joined)


KEYS = st.lists(
    st.tuples(st.sampled_from(["data.text", "data.validation", "max_length", "seed", "data.header", "x"]), VALUES).map(
        "=".join
    ),
    max_size=1,
)
RUN = st.sampled_from(["model"] * 8 + ["made", "no", "", "model/config.json", "a/b/c", "é", "~x", "pypi:x", "x" * 300])
OUT = st.sampled_from(PLACES)
RECIPE = st.sampled_from(RECIPES).map(lambda name: ["--recipe", name])
NO_RELEASE = VALUES.filter(lambda word: not word[:1].isdigit())  # pip would be asked for one


def verb(name: str, *parts: st.SearchStrategy[Words] | Words) -> st.SearchStrategy[Words]:
    drawn = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]
    return st.tuples(*drawn).map(lambda found: [name, *joined(found)])


def one(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[Words]:
    return strategy.map(lambda word: [word])


COMMANDS: dict[str, st.SearchStrategy[Words]] = {
    "predict": verb(
        "predict",
        one(RUN),
        st.sampled_from([["FILE"], ["FILE"], ["FILE"], ["made"], ["no.csv"], ["-"], []]),
        st.sampled_from([[], ["data.text=text"], ["data.text=a"]]),
        KEYS,
        st.one_of(st.just([]), OUT.map(lambda place: ["--out", place])),
        options("--batch", "--format", "--keep", "--task", "--probabilities*"),
    ),
    "evaluate": verb(
        "evaluate",
        one(RUN),
        st.sampled_from([["data.validation=FILE"], ["data.validation=FILE", "data.label=label"], []]),
        KEYS,
        options("--batch", "--task", "--json*"),
    ),
    "export": verb(
        "export",
        one(st.sampled_from(["merged", "onnx", "gguf", "mlx", "coreml", "onx", ""])),
        one(RUN),
        one(OUT),
        options("--weights", "--lengths", "--converter"),
    ),
    "push": verb("push", one(RUN), one(VALUES | st.just("me/model")), ["--dry-run"], options("--private*")),
    "bench": verb(
        "bench",
        KEYS,
        st.lists(RECIPE | OUT.map(lambda place: ["--output", place]), max_size=2).map(joined),
        options("--recipe", "--model", "--task", "--warm-up", "--repetitions", "--torch", "--launches*", "--quick*"),
    ),
    "kernels": verb(
        "kernels",
        st.one_of(
            verb("fetch", ["--wheel"], one(st.sampled_from(["FILE", "wheel.whl", *PLACES]))),
            st.tuples(st.sampled_from(["show", "remove", "fetch"]), NO_RELEASE).map(list),
            verb("list", options("--family", "--torch", "--json*")),
        ),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that sorts texts into three classes."""
    import sklearn  # noqa: F401  sets KMP_ variables when it is first imported

    folder = tiny.model(tmp_path_factory.mktemp("models") / "model")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).save_pretrained(folder)
    return folder


Case = Callable[[tuple[Words, Any, str, Any]], None]


@pytest.fixture
def case(model: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Case:
    """Run a drawn command in a folder of its own, and look at its end."""

    def nothing_measured(*_: Any, **__: Any) -> None:
        raise RunError("measured; next: hf-mps bench")

    monkeypatch.setattr("hf_mps.tools.bench.measure", nothing_measured)
    monkeypatch.setattr("hf_mps.tools.bench.count", nothing_measured)
    for kind in FORMATS.values():
        if kind.name != "merged":  # their libraries take seconds
            monkeypatch.setattr(kind, "write", nothing_measured)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    packed = wheel(tmp_path / "wheels")
    place = tmp_path / "here"

    def run(drawn: tuple[Words, Any, str, Any]) -> None:
        words, damage, hit, (ending, content) = drawn
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(model, place / "model")
        (place / "made").mkdir()
        monkeypatch.chdir(place)
        target = Path("model", hit)
        if damage in ("gone", "folder"):
            target.unlink()
            if damage == "folder":
                target.mkdir()
        elif damage is not None:
            target.write_bytes(strategies.damaged(target.read_bytes(), damage))
        name = f"rows.{ending}"
        Path(name).write_bytes(content)
        shutil.copyfile(packed, "wheel.whl")
        words = [word.replace("FILE", name) if "FILE" in word else word for word in words]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8"))
        try:
            code = main([*words, "--debug"])
        except (UserError, RunError) as error:
            complaint(error)
        else:
            assert code in (0, 1, 2)
            looked_at(words, capfd.readouterr())

    return run


def looked_at(words: Words, printed: Any) -> None:
    """Fail where answers are not one for each row."""
    if words[0] == "predict" and "--out" not in words and "jsonl" not in words:
        rows = list(csv.DictReader(printed.out.splitlines(keepends=True)))
        counts = [line for line in printed.err.splitlines() if " answered in " in line]
        assert counts[-1].startswith(f"hf-mps: {len(rows)} row"), (words, printed)
        assert all(row["prediction"].startswith("LABEL_") for row in rows)


def drawn(name: str) -> st.SearchStrategy[Any]:
    return st.tuples(COMMANDS[name], DAMAGE, st.sampled_from(DAMAGED), FILES)


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_words_and_files_are_answered_in_a_line(name: str, case: Case) -> None:
    cases(25)(given(drawn(name))(case))()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_thousands_more(name: str, case: Case) -> None:
    settings(THOUSANDS, max_examples=1000)(given(drawn(name))(case))()
