"""hf-mps predict: the answers of a run's own predictions.csv, for rows of any form, without their labels."""

from __future__ import annotations

import gc
import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.tools.saved.run import forget_rows, open_run
from tests.finetune import tiny
from tests.finetune.tiny import Ended
from tests.snapshots import masked
from tests.tools.saved.conftest import RECIPES, Kept, Made, read_csv

Command = Callable[..., Ended]

# The columns of predictions.csv that only rows with labels have.
TRUTH = ("label", "truth", "exact_match", "f1", "wer", "cer", "reference", "right", "score", "rank", "nearest")


@pytest.mark.rotated
@pytest.mark.parametrize("task", RECIPES)
def test_the_answers_to_the_validation_rows_are_those_of_the_run(task: str, kept: Made, command: Command) -> None:
    run = kept(task)
    ended = command("predict", run.folder, run.rows)
    assert ended.code == 0, ended.err
    answers = read_csv(ended.out)
    theirs = [{name: cell for name, cell in row.items() if name not in TRUTH} for row in run.predictions]
    assert len(theirs) >= 3
    # A language model's own answers are written for the first rows alone.
    assert len(answers) >= len(theirs)
    assert [list(row) for row in answers[: len(theirs)]] == [list(row) for row in theirs]
    for answer, its in zip(answers, theirs, strict=False):
        assert {name: number(cell) for name, cell in answer.items()} == {
            # A reward is a difference of sums of logarithms: 1e-5 is float32's rounding there, and exact elsewhere.
            name: pytest.approx(found, abs=1e-5) if isinstance(found := number(cell), float) else found
            for name, cell in its.items()
        }


def number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


@pytest.fixture
def pairs(kept: Made) -> Kept:
    """A run that tells pairs of sentences apart."""
    return kept("text-classification")


def rows_of(run: Kept) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.rows.read_text(encoding="utf-8").splitlines()]


def test_rows_come_as_csv_jsonl_or_through_a_pipe_and_leave_as_csv_or_jsonl(
    pairs: Kept, command: Command, tmp_path: Path
) -> None:
    bare = [{name: row[name] for name in ("sentence1", "sentence2")} for row in rows_of(pairs)]
    as_csv, as_jsonl = tiny.write_csv(tmp_path / "rows.csv", bare), tiny.write_jsonl(tmp_path / "rows.jsonl", bare)
    whole = command("predict", pairs.folder, as_csv).out
    assert len(read_csv(whole)) == len(bare)
    assert command("predict", pairs.folder, as_jsonl).out == whole
    assert command("predict", pairs.folder, stdin=as_csv.read_bytes()).out == whole
    old_spreadsheet = as_csv.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r")
    assert command("predict", pairs.folder, stdin=old_spreadsheet).out == whole
    assert command("predict", pairs.folder, "-", stdin=as_jsonl.read_bytes()).out == whole
    os.mkfifo(pipe := tmp_path / "63")  # what `<(zcat rows.csv.gz)` names
    threading.Thread(target=lambda: pipe.write_bytes(as_csv.read_bytes()), daemon=True).start()
    assert command("predict", pairs.folder, pipe).out == whole
    lines = command("predict", pairs.folder, as_csv, "--format", "jsonl").out.splitlines()
    parsed = [{name: str(value) for name, value in json.loads(line).items()} for line in lines]
    assert parsed == read_csv(whole)


def test_a_line_of_text_is_a_row_where_a_row_is_one_text(kept: Made, command: Command) -> None:
    run = kept("summarization")
    said = [row["prompt"] for row in run.predictions]
    ended = command("predict", run.folder, stdin="\n".join(said))
    assert [row["generated"] for row in read_csv(ended.out)] == [row["generated"] for row in run.predictions]
    ended = command("predict", kept("text-classification").folder, stdin="a line\n")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith(
        snapshot("hf-mps: stdin: a line of text is one column, a row has sentence1, sentence2; allowed: csv, jsonl\n")
    )


def test_a_closed_stdin_is_one_line(pairs: Kept, kept: Made, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["predict", str(pairs.folder)]) == 2
    said = "hf-mps: stdin is closed, and the rows come from there; next: a FILE in place of -"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert main(["chat", str(kept("sft").folder)]) == 0


def test_a_home_folder_is_found_by_its_sign(
    pairs: Kept, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no shell reads the ~ in --out=~/answers.csv
    ended = command("predict", pairs.folder, pairs.rows, "--out=~/answers.csv")
    assert (ended.code, (tmp_path / "answers.csv").is_file()) == (0, True), ended.err


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_sentence_of_a_parquet_file_is_split_into_words(
    kind: str, kept: Made, command: Command, tmp_path: Path
) -> None:
    import pyarrow
    from pyarrow import parquet

    run = kept("token-classification")
    words = [row["word"] for row in run.predictions if row["row"] == "1"]
    column = pyarrow.array([" ".join(words)], getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"words": column}), tmp_path / "rows.parquet")
    ended = command("predict", run.folder, tmp_path / "rows.parquet", "data.words=words")
    assert [row["word"] for row in read_csv(ended.out)] == words, ended.err


def test_a_sentence_is_split_into_words_and_a_picture_is_a_row(kept: Made, command: Command) -> None:
    run = kept("token-classification")
    first = [row["word"] for row in run.predictions if row["row"] == "1"]
    tags = [row["prediction"] for row in run.predictions if row["row"] == "1"]
    answers = read_csv(command("predict", run.folder, stdin=" ".join(first) + "\n").out)
    assert [row["word"] for row in answers] == first
    assert [row["prediction"] for row in answers] == tags
    pictures = kept("image-classification")
    (answer,) = read_csv(command("predict", pictures.folder, pictures.rows.parent / "validation" / "000.png").out)
    assert answer["prediction"] == pictures.predictions[0]["prediction"]
    assert answer["probability"] == pictures.predictions[0]["probability"]


def test_a_folder_may_be_named_from_here(kept: Made, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = kept("image-classification")
    monkeypatch.chdir(pictures.rows.parent.parent)
    here = f"{pictures.rows.parent.name}/validation"
    answers = read_csv(command("predict", pictures.folder, here).out)
    assert len(answers) == len(list(Path(here).glob("*.png")))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (None, "row 2 has no words; allowed: a list in every row"),
        (["a", None], "row 2: word 2 is missing; allowed: a text for each word"),
    ],
)
def test_a_row_without_a_word_is_refused_by_its_number(
    kept: Made, command: Command, tmp_path: Path, words: list[str | None] | None, told: str
) -> None:
    file = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"tokens": ["a"]}, {"tokens": words}])
    ended = command("predict", kept("token-classification").folder, file)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith(f"rows.jsonl: {told}\n")


def test_another_name_of_a_column_is_given_as_in_a_recipe(pairs: Kept, command: Command, tmp_path: Path) -> None:
    rows = [{"first": row["sentence1"], "second": row["sentence2"]} for row in rows_of(pairs)]
    file = tiny.write_csv(tmp_path / "rows.csv", rows)
    ended = command("predict", pairs.folder, file, "data.text=first", "data.text_pair=second")
    assert [row["prediction"] for row in read_csv(ended.out)] == [row["prediction"] for row in pairs.predictions]


def test_a_file_appears_whole_and_never_over_another(pairs: Kept, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    ended = command("predict", pairs.folder, pairs.rows, "--out", out)
    assert (ended.code, ended.out) == (0, "")
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(pairs.predictions)
    ended = command("predict", pairs.folder, pairs.rows, "--out", out)
    assert (ended.code, masked(ended.err, out=str(out))) == (
        2,
        snapshot("hf-mps: --out <out> exists already and is never overwritten; give another name\n"),
    )
    broken = tiny.write_jsonl(tmp_path / "broken.jsonl", [{"sentence1": "one", "sentence2": None}])
    other = tmp_path / "other.csv"
    assert command("predict", pairs.folder, broken, "--out", other).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "broken.jsonl"]


def test_rows_are_answered_a_few_at_a_time_and_none_is_loaded_before(pairs: Kept, tmp_path: Path) -> None:
    from hf_mps.tools.saved import predict

    file = tmp_path / "rows.csv"
    tiny.write_csv(file, [{"sentence1": f"one {n}", "sentence2": f"two {n}"} for n in range(20_000)])
    with file.open("a", encoding="utf-8") as end:
        end.write("one,two,too many\n")
    with predict.opened(open_run(str(pairs.folder)), str(file)) as given:
        batches = given.batches(1000)
        assert next(batches)[0].dataset[0] == {"text": "one 0", "text_pair": "two 0"}
        assert [len(next(batches)[0].dataset) for _ in range(19)] == [1000] * 19
        with pytest.raises(UserError, match=r"row 20001 .* has 3 fields and the header 2"):
            next(batches)


def test_answered_rows_are_let_go_of(pairs: Kept) -> None:

    from hf_mps.tools.saved import predict

    def alive() -> int:
        gc.collect()
        return sum(isinstance(one, Dataset) for one in gc.get_objects())

    run = open_run(str(pairs.folder))
    counts = []
    with predict.opened(run, str(pairs.rows)) as given, predict.answering(run) as (made, trainer):
        for some, _ in given.batches(2):
            assert len(list(made.answers(trainer, some))) == 2
            forget_rows(trainer)
            counts.append(alive())
    assert len(counts) >= 4
    assert counts[-1] <= counts[0]


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "multiple-choice"])
def test_the_probability_of_every_class_is_there_on_demand(task: str, kept: Made, command: Command) -> None:
    run = kept(task)
    ended = command("predict", run.folder, run.rows, "--probabilities", "--format", "jsonl")
    assert ended.code == 0, ended.err
    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert [answer["prediction"] for answer in answers] == [row["prediction"] for row in run.predictions]
    for answer in answers:
        shares = answer["probabilities"]
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
        assert shares[answer["prediction"]] == max(shares.values()) == answer["probability"]


def test_columns_of_the_input_are_kept_beside_the_answers(pairs: Kept, command: Command, tmp_path: Path) -> None:
    made = [row | {"id": f"row-{at}", "note": at} for at, row in enumerate(rows_of(pairs))]
    plain = read_csv(command("predict", pairs.folder, pairs.rows).out)
    for file in (tiny.write_jsonl(tmp_path / "rows.jsonl", made), tiny.write_csv(tmp_path / "rows.csv", made)):
        answers = read_csv(command("predict", pairs.folder, file, "--keep", "id", "--keep", "note").out)
        assert [list(answer)[:2] for answer in answers] == [["id", "note"]] * len(made)
        kept_apart = [(answer.pop("id"), answer.pop("note")) for answer in answers]
        assert kept_apart == [(f"row-{at}", f"{at}") for at in range(len(made))]
        assert answers == plain
    wrong = command("predict", pairs.folder, tmp_path / "rows.csv", "--keep", "ident")
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err.splitlines()[-1].rpartition("rows.csv: ")[2] == snapshot(
        "there is no column 'ident' for --keep; allowed: sentence1, sentence2, label, id, note"
    )


def test_a_kept_column_stands_at_every_word_of_its_row(kept: Made, command: Command, tmp_path: Path) -> None:
    run = kept("token-classification")
    made = [row | {"id": f"row-{at}", "word": 1} for at, row in enumerate(rows_of(run), 1)]
    file = tiny.write_jsonl(tmp_path / "rows.jsonl", made)
    answers = read_csv(command("predict", run.folder, file, "--keep", "id").out)
    assert [answer["id"] for answer in answers] == [f"row-{answer['row']}" for answer in answers]
    assert command("predict", run.folder, file, "--keep", "word").err.splitlines()[-1] == snapshot(
        "hf-mps: --keep word: the answers already have a column 'word'; leave it out"
    )


def test_probabilities_of_classes_that_there_are_not_are_refused(kept: Made, command: Command) -> None:
    run = kept("summarization")
    ended = command("predict", run.folder, run.rows, "--probabilities")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1] == snapshot(
        "hf-mps: --probabilities is for classes, which summarization does not predict; leave it out"
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_changes_no_answer(pairs: Kept, command: Command, batch: int) -> None:
    answers = read_csv(command("predict", pairs.folder, pairs.rows, "--batch", batch).out)
    for answer, its in zip(answers, pairs.predictions, strict=True):
        assert answer["prediction"] == its["prediction"]
        assert float(answer["probability"]) == pytest.approx(float(its["probability"]), abs=2e-4)


def test_the_device_and_the_reasons_stand_on_stderr(pairs: Kept, command: Command) -> None:
    lines = command("predict", pairs.folder, pairs.rows).err.splitlines()
    assert lines[0].startswith(f"hf-mps: {pairs.folder}: task text-classification (its recipe.yaml); device mps (")
    assert "; precision fp32 (" in lines[0]
    assert lines[-1].startswith(f"hf-mps: {len(pairs.predictions)} rows answered in ")


def test_squads_own_format_is_known_by_its_beginning(kept: Made, command: Command, tmp_path: Path) -> None:
    run = kept("question-answering")
    plain = read_csv(command("predict", run.folder, run.rows).out)
    paragraphs = [{"context": row["context"], "qas": [{"question": row["question"]}]} for row in rows_of(run)]
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]}), encoding="utf-8")
    answers = read_csv(command("predict", run.folder, squad).out)
    assert [answer["prediction"] for answer in answers] == [answer["prediction"] for answer in plain]
    field = "data.field=data.paragraphs.qas"  # as the recipe of a run on such a file has it
    assert read_csv(command("predict", run.folder, run.rows, field).out) == plain


def test_embeddings_are_given_for_texts_alone_and_cosines_for_pairs(kept: Made, command: Command) -> None:
    import numpy

    run = kept("sentence-embeddings")
    texts = [text for row in run.predictions for text in (row["text"], row["text_pair"])]
    ended = command("predict", run.folder, "data.text=text", "--format", "jsonl", stdin="\n".join(texts))
    vectors = numpy.array([json.loads(line)["embedding"] for line in ended.out.splitlines()])
    cosines = (vectors[::2] * vectors[1::2]).sum(axis=1)
    assert cosines == pytest.approx([float(row["cosine"]) for row in run.predictions], abs=1e-4)


def test_a_preference_model_answers_prompts_too(kept: Made, command: Command, tmp_path: Path) -> None:
    run = kept("dpo")
    file = tiny.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Say it in other words: The film felt warm."}])
    (answer,) = read_csv(command("predict", run.folder, file).out)
    assert answer["prompt"] == "user: Say it in other words: The film felt warm."
    assert set(answer) == {"prompt", "generated"}
    other = tiny.write_jsonl(tmp_path / "other.jsonl", [{"question": "Is it warm?", "good": "Yes.", "bad": "No."}])
    ended = command("predict", run.folder, other)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1].rpartition("other.jsonl: ")[2] == snapshot(
        "there is none of the columns prompt, chosen, rejected; the columns are question, good, bad; next:"
        " data.prompt=NAME for the one that it is"
    )
    assert command("predict", run.folder, other, "data.prompt=question").code == 0


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (["nowhere.csv"], "", snapshot("nowhere.csv: there is no such file")),
        (["-"], "", snapshot("stdin: holds no rows; allowed: at least one")),
        (
            ["-"],
            '{"sentence1": "a"}\n',
            snapshot("stdin: there is no column 'sentence2' for data.columns.text_pair; the columns are sentence1"),
        ),
        (
            ["-"],
            '{"sentence1": "a", "sentence2": "b"}\n{"sentence1": "a"}\n',
            snapshot("stdin: row 2 has no text_pair; allowed: a text in every row"),
        ),
        (
            ["-"],
            '{"sentence1": "a", \n',
            snapshot("stdin: line 1 is no JSON: Expecting property name enclosed in double quotes"),
        ),
        (["-", "--format", "xml"], "", snapshot("--format xml; allowed: csv, jsonl")),
        (["-", "--out", "answers.xml"], "", snapshot("--out answers.xml: the name ends in .xml; allowed: csv, jsonl")),
        (["-", "data.txt=a"], "", snapshot("command line: data.txt is not a key here; allowed: hub, config, revision")),
        (["a", "b"], "", snapshot("predict takes one file, not a and b; give one, or - and both on stdin")),
        (["-", "--out", "."], "", "--out . is a folder; next: --out answers.csv"),
        (["-", "--out", "/proc/x.csv"], "", "--out /proc/x.csv: /proc is not writable: "),
        (
            ["-", "--batch", "99999999999999999999"],
            "",
            "Invalid value for '--batch': Input should be less than or equal to 1000000; ",
        ),
        (["-", "training.learning_rate=1"], "", "training.learning_rate changes only a training; leave it out"),
    ],
)
def test_bad_rows_and_files_end_in_one_line(
    pairs: Kept, command: Command, words: list[str], stdin: str, said: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("predict", pairs.folder, *words, stdin=stdin)
    assert (ended.code, ended.out) == (2, "")
    last = ended.err.splitlines()[-1]
    assert last.startswith("hf-mps: ")
    assert last.removeprefix("hf-mps: ").startswith(said), last
    assert "Traceback" not in ended.err


def test_a_closed_stdout_is_refused_before_the_model_is_loaded(
    pairs: Kept, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert command("recipes", "list").code == 0
    ended = command("predict", pairs.folder, pairs.rows)
    assert (ended.code, ended.err) == (2, "hf-mps: stdout is closed, and the answers go there; next: --out FILE\n")


def test_answers_are_utf8_whatever_the_locale(pairs: Kept, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    ended = command("predict", pairs.folder, "-", stdin='{"sentence1": "หนังดีมาก", "sentence2": "这部电影"}\n')
    assert ended.code == 0
    assert "หนังดีมาก,这部电影," in out.buffer.getvalue().decode()  # type: ignore[attr-defined]
