"""Question answering: windows that hold the answer, SQuAD's own scores, a model that finds it, on the device mps."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from inline_snapshot import snapshot
from transformers import AutoTokenizer

from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.tasks.question_answering import QuestionAnswering, Recipe, refuse_other_than_squads
from hf_mps.finetune.text.windows import NOWHERE, token_span
from hf_mps.metrics import squad
from tests.finetune import builders, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

RECIPE = """# Find the animal.
task: question-answering
model: model
data:
  files: {train: train.jsonl, validation: dev.jsonl}
seed: 1
max_length: 24
doc_stride: 4
training:
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  num_train_epochs: 3
"""


def rows(count: int, seed: int = 0, nothing: bool = False) -> list[dict[str, Any]]:
    """Who was where? With `nothing`, the text of every third question does not tell."""
    draw, made = random.Random(seed), []
    for number in range(count):
        animal, spot = draw.choice(tiny.ANIMALS), draw.choice(tiny.PLACES)
        text = f"the {animal} was on the {spot}"
        question, answer = draw.choice([("it is", animal), ("it was on", spot)])
        truth: dict[str, list[Any]] = {"text": [answer], "answer_start": [text.index(answer)]}
        if nothing and number % 3 == 0:
            text, truth = text.replace(answer, "bad"), {"text": [], "answer_start": []}
        made.append({"context": text, "question": question, "answers": truth})
    return made


@pytest.fixture
def asking(desk: Path) -> Path:
    """The desk with a recipe that asks, and its rows."""
    tiny.write_jsonl(desk / "train.jsonl", rows(96))
    tiny.write_jsonl(desk / "dev.jsonl", rows(24, seed=1))
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_a_model_learns_to_answer_and_says_what_it_answered(asking: Path, finetune: Command) -> None:
    finetune("my.yaml").finished()
    said = results(asking / "runs/my")
    assert said["device"]["value"] == "mps"
    assert said["main_metric"] == "f1"
    assert set(said["metrics"]) == {"exact_match", "f1", "loss"}
    assert said["metrics"]["exact_match"] >= 75 > said["baseline"]["metrics"]["exact_match"] == 0
    assert said["baseline"]["what"] == snapshot("always answers with the first sentence of the text")
    assert said["choices"]["questions_without_answer"] == {
        "value": False,
        "reason": snapshot("0 of 96 training rows have no answer"),
    }
    assert said["fallback"] == []
    lines = predictions(asking / "runs/my")
    given = [json.loads(line) for line in (asking / "dev.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["question"] for line in lines] == [row["question"] for row in given]
    assert [line["id"] for line in lines] == [str(number) for number in range(1, 25)]
    for line, row in zip(lines, given, strict=True):
        start = int(line["start"])
        assert row["context"][start : start + len(line["prediction"])] == line["prediction"]
        assert float(line["exact_match"]) == squad.exact_match(line["prediction"], row["answers"]["text"])
        assert 0 < float(line["probability"]) <= 1
    share = 100 * sum(float(line["exact_match"]) for line in lines) / len(lines)
    assert share == pytest.approx(said["metrics"]["exact_match"])
    assert (asking / "runs/my/answers.png").read_bytes().startswith(b"\x89PNG")


def test_questions_without_an_answer_are_learned_and_measured_apart(asking: Path, finetune: Command) -> None:
    tiny.write_jsonl(asking / "train.jsonl", rows(96, nothing=True))
    tiny.write_jsonl(asking / "dev.jsonl", rows(24, seed=1, nothing=True))
    finetune("my.yaml", "training.num_train_epochs=2").finished()
    said = results(asking / "runs/my")
    numbers = {"exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"}
    assert set(said["metrics"]) == {*numbers, "loss"}
    assert said["baseline"]["metrics"]["NoAns_f1"] == 100
    assert said["baseline"]["metrics"]["f1"] == pytest.approx(100 / 3)
    assert {"null_score_diff"} <= set(predictions(asking / "runs/my")[0])
    # Nothing but "no answer" where any null score passes.
    assert finetune("my.yaml", "training.max_steps=1", "null_score_diff_threshold=-1000", "output_dir=all").code == 0
    assert {line["prediction"] for line in predictions(asking / "all")} == {""}


def test_squads_own_format_is_read_and_a_texts_questions_stay_together(asking: Path, finetune: Command) -> None:
    made = rows(48)
    texts = [made[at : at + 3] for at in range(0, 48, 3)]
    paragraphs = [
        {
            "context": f"the {group[0]['context']} {number}",
            "qas": [
                {
                    "id": f"{number}-{token_span}",
                    "question": row["question"],
                    "answers": [{"text": "the", "answer_start": 0}],
                }
                for token_span, row in enumerate(group)
            ],
        }
        for number, group in enumerate(texts)
    ]
    squad = {"version": "1.1", "data": [{"title": "animals", "paragraphs": paragraphs}]}
    (asking / "squad.json").write_text(json.dumps(squad), encoding="utf-8")
    nested = ("data.files={train: squad.json}", "data.hold_out=0.25")
    finetune("my.yaml", *nested, "data.columns.id=id", "training.max_steps=1").finished()
    held = [line["id"].partition("-")[0] for line in predictions(asking / "runs/my")]
    assert len(held) == 12
    assert all(held.count(paragraph) == 3 for paragraph in held)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({}, "metrics=accuracy", "metrics has 'accuracy', which question-answering does not compute; allowed: squad"),
        (
            {"answers": {"text": [], "answer_start": []}},
            "version_2_with_negative=false",
            "train.jsonl: row 1 has no answer; next: version_2_with_negative=true",
        ),
        (
            {"answers": {"text": ["bird"], "answer_start": [0]}},
            "seed=1",
            "train.jsonl: row 1: the text at answer_start 0 is 'the ', not 'bird'; allowed: the answer's place,"
            " in characters from 0",
        ),
        (
            {"answers": {"text": [""], "answer_start": [0]}},
            "seed=1",
            "train.jsonl: row 1 has an empty answer; allowed: a text, or an empty list where there is none",
        ),
        (
            {"answers": {"text": ["cat"], "answer_start": [4, 8]}},
            "seed=1",
            "train.jsonl: row 1 has 1 answer and 2 in answer_start; allowed: a place for each",
        ),
        ({"question": None}, "seed=1", "train.jsonl: row 1 has no question; allowed: a text in every row"),
        (
            {"question": "the " * 20},
            "seed=1",
            "train.jsonl: row 1: the question has 20 tokens, which leaves 1 of 24 for the text; allowed: more than"
            " doc_stride, 4; next: a larger max_length or a smaller doc_stride",
        ),
    ],
)
def test_what_cannot_be_asked_or_measured_is_named(
    asking: Path, finetune: Command, change: dict[str, Any], words: str, message: str
) -> None:
    lines = rows(12)
    lines[0] |= change
    tiny.write_jsonl(asking / "train.jsonl", lines)
    assert finetune("my.yaml", words).refused() == message


def test_a_typed_stride_as_long_as_the_window_is_refused_and_a_files_own_gives_way(
    asking: Path, finetune: Command
) -> None:
    assert finetune("my.yaml", "doc_stride=24").refused() == "doc_stride is 24; allowed: less than a window's 24 tokens"
    (asking / "long.yaml").write_text(RECIPE.replace("stride: 4", "stride: 128"), encoding="utf-8")
    finetune("long.yaml", "max_length=18", "training.max_steps=1").finished()


def dataset(lines: list[dict[str, Any]]) -> Rows:
    return Rows(Dataset.from_list(lines), "here")


@pytest.fixture(params=["right", "left"])
def cut(asking: Path, request: pytest.FixtureRequest) -> QuestionAnswering:
    """How to cut, with the padding behind the text and, as in XLNet, before it: the text then comes first."""
    recipe = Recipe.model_construct(doc_stride=3)
    task = QuestionAnswering(recipe, Checkpoint("tiny", str(asking / "model"), local=True))
    task.tokenizer = AutoTokenizer.from_pretrained(asking / "model", padding_side=request.param)
    task.longest, task.content = 12, "tiny"
    return task


def test_a_long_text_is_cut_into_windows_that_overlap_and_know_where_the_answer_is(cut: QuestionAnswering) -> None:
    text = "the cat is good " * 6 + "the bird is bad"
    start = text.index("bird")
    made = cut.inputs(
        dataset([{"context": text, "question": "bad", "answers": {"text": ["bird"], "answer_start": [start]}}])
    )
    seen: set[tuple[int, int]] = set()
    with_answer = 0
    for one in made:
        assert len(one["input_ids"]) <= 12
        spans = [(a, b) for a, b in zip(one["starts"], one["ends"], strict=True) if a != NOWHERE]
        seen |= set(spans)
        first, last = one["start_positions"], one["end_positions"]
        if first == last == one["null"]:
            assert not any(a <= start < b for a, b in spans)
        else:
            with_answer += 1
            assert text[one["starts"][first] : one["ends"][last]] == "bird"
    assert "".join(text[a:b] for a, b in sorted(seen)) == text.replace(" ", "")
    assert len(made) > 2
    assert with_answer >= 1
    parts = [[a for a in one["starts"] if a != NOWHERE] for one in made]
    assert all(len(set(one) & set(other)) == 3 for one, other in itertools.pairwise(parts))
    assert set(made["row"]) == {0}


def test_squads_recipe_measures_rows_without_an_answer_as_squad_2_does(asking: Path) -> None:
    lines = rows(12)
    lines[0] |= {"answers": {"text": [], "answer_start": []}}
    place = str(tiny.write_jsonl(asking / "train.jsonl", lines))
    said: dict[str, Any] = {"task": "question-answering", "model": str(asking / "model")}
    said |= {"metrics": load_recipe("question-answering/squad").recipe.metrics, "doc_stride": 4, "max_length": 24}
    prepared = builders.prepare(**said, data={"files": {"train": place, "validation": place}})
    assert prepared.metrics.names == ("squad_v2",)


@pytest.mark.parametrize(
    "answers",
    [
        [{"text": "cat", "answer_start": 4}],
        {"text": "cat", "answer_start": 4},
        {"text": [" cat "], "answer_start": [3]},
    ],
)
def test_answers_may_be_a_list_of_dicts_as_in_squads_files_or_one_and_have_blanks_at_their_ends(
    cut: QuestionAnswering, answers: Any
) -> None:
    row = {"context": "the cat is good", "question": "good", "answers": answers}
    lines = dataset([row])
    refuse_other_than_squads(lines)
    made = cut.inputs(lines)
    [one] = made
    assert one["start_positions"] == one["end_positions"]
    assert one["starts"][one["start_positions"]] == 4


@pytest.mark.parametrize("answers", ["c", {"text": [1942], "answer_start": [0]}])
def test_another_answers_column_is_refused(answers: Any) -> None:
    with pytest.raises(UserError, match=r"^here: data.columns.answers names a column of .*; allowed: SQuAD's"):
        refuse_other_than_squads(dataset([{"context": "a", "question": "b", "answers": answers}]))


def test_an_answer_that_begins_or_ends_inside_a_token_takes_the_whole_token() -> None:
    starts, ends = [NOWHERE, 0, 4, 9, NOWHERE], [NOWHERE, 3, 8, 12, NOWHERE]
    assert token_span(starts, ends, (5, 10)) == (2, 3)
    assert token_span(starts, ends, (0, 3)) == (1, 1)
    assert token_span(starts, ends, (3, 4)) == (1, 2)
    assert token_span(starts, ends, (9, 13)) is None
    assert token_span(starts, ends, None) is None


@pytest.mark.parametrize(
    ("answer", "truths", "exact", "f1"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),
        ("an  apple", ["Apple."], 1.0, 1.0),
        ("theatre", ["the atre"], 0.0, 0.0),
        ("in 1998", ["1998", "the year 1998"], 0.0, 2 / 3),
        ("red and blue", ["blue and green", "red"], 0.0, 2 / 3),
        ("cat cat", ["cat"], 0.0, 2 / 3),
        ("Zürich", ["zürich,"], 1.0, 1.0),
        ("U.S.", ["US"], 1.0, 1.0),
        ("", ["cat"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("cat", [], 0.0, 0.0),
    ],
)
def test_scores_are_squads_after_its_own_normalisation(answer: str, truths: list[str], exact: float, f1: float) -> None:
    assert squad.exact_match(answer, truths) == exact
    assert squad.f1(answer, truths) == pytest.approx(f1)
