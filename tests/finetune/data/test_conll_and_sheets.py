"""CoNLL's columns and the first sheet of a workbook, read as they are published and as a person sees them."""

from __future__ import annotations

import datetime
import gzip
import json
import sys
import zipfile
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import load
from hf_mps.finetune.tasks import token_classification
from tests.finetune.readers import both, loaded, refusal
from tests.finetune.tiny import Command

pytestmark = pytest.mark.usefixtures("in_own_folder")

TWO = {"text": "text", "label": "label"}
# As CoNLL-2003 is published: four columns, documents apart, a blank line between sentences.
CONLL = (
    "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\nsleeps VBZ B-VP O\n\n\nOslo NNP B-NP B-LOC\n\n"
    "-DOCSTART- -X- -X- O\n\nRain NN B-NP O\n"
)


def tagged(name: str, **columns: object) -> load.Rows:
    made = token_classification.Data.model_validate({**both(name), "columns": columns})
    load.check(made)
    return load.load(made, seed=1)["train"]


@pytest.mark.parametrize("name", ["train.txt", "train.conll", "train.conll.gz"])
def test_conll_files_are_read_as_they_are_published(name: str) -> None:
    content = CONLL.encode()
    Path(name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    rows = tagged(name)
    assert rows.dataset[:] == {
        "words": [["Ada", "sleeps"], ["Oslo"], ["Rain"]],
        "tags": [["B-PER", "O"], ["B-LOC"], ["O"]],
    }
    assert rows.origin == f"{name} (words in column 0, tags in column 3 of 4)"
    assert tagged(name, tags=1).dataset["tags"][:] == [["NNP", "VBZ"], ["NNP"], ["NN"]]
    assert tagged(name, tags="-2").dataset["tags"][:] == [["B-NP", "B-VP"], ["B-NP"], ["B-NP"]]


def test_conll_files_between_tabs_keep_words_with_spaces_and_leave_comments_out() -> None:
    Path("a.conll").write_text("# id = 1\nNew York\tB-LOC\nrains\tO\n\n# text\n#\tO\n", encoding="utf-8")
    rows = tagged("a.conll").dataset
    assert rows[:] == {"words": [["New York", "rains"], ["#"]], "tags": [["B-LOC", "O"], ["O"]]}


@pytest.mark.parametrize(
    ("content", "columns", "line"),
    [
        (
            CONLL,
            {"tags": "pos"},
            "there is no column 'pos' for data.columns.tags; a CoNLL file's columns have numbers:",
        ),
        (
            CONLL,
            {"tags": 4},
            "there is no column '4' for data.columns.tags; a CoNLL file's columns have numbers: 0 to 3",
        ),
        ("a O\nb O\nc\n", {}, "line 3 has 1 column and the first 2; allowed: as many in each, an empty line between"),
        ("Ada\nsleeps\n", {}, "column 0 of 1 would be both words and tags; next: data.words=NUMBER data.tags=NUMBER"),
        ("\n\n", {}, "holds no rows; allowed: at least one"),
    ],
)
def test_a_conll_file_that_does_not_fit_is_refused(content: str, columns: dict[str, object], line: str) -> None:
    Path("a.conll").write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        tagged("a.conll", **columns)
    assert str(raised.value).startswith(f"a.conll: {line}")


def test_a_conll_file_is_tagged_from_the_command_line(desk: Path, finetune: Command) -> None:
    for name in ("train.txt", "dev.txt"):
        Path(name).write_text(CONLL.replace("Ada", "the").replace("Rain", "cat") * 4, encoding="utf-8")
    words = ["data.train=train.txt", "data.validation=dev.txt", "data.words=0", "data.tags=-1", "--plan", "--json"]
    ended = finetune("token-classification/conll2003", "model=model", "max_length=64", *words)
    assert ended.code == 0, ended.err
    choices = json.loads(ended.out)["choices"]
    assert choices["data"] == {
        "value": "12 + 12 rows",
        "reason": snapshot(
            "train: train.txt (words in column 0, tags in column 3 of 4); validation: dev.txt (words in column 0,"
            " tags in column 3 of 4)"
        ),
    }
    assert choices["tags"]["value"] == "3 tags: O, B-LOC, B-PER"


def test_a_conll_file_is_for_tagging_alone() -> None:
    Path("a.conll").write_text(CONLL, encoding="utf-8")
    assert refusal(both("a.conll"), TWO).startswith(
        "a.conll: CoNLL files are for token-classification; allowed: .csv, "
    )


def workbook(path: str, *rows: list[object], more: bool = False) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    if more:
        book.create_sheet("Notes").append(["text", "label"])
    book.save(path)


def test_the_first_sheet_of_a_workbook_is_read_as_it_is_seen() -> None:
    day, time = datetime.datetime(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4)
    workbook(
        "a.xlsx", ["text", "label", "when"], ["fine", 1, day], [], ["so, so", 2.5, time], [True, 3.0, ""], more=True
    )
    rows = loaded(both("a.xlsx"), {**TWO, "when": "when"})["train"]
    assert rows.dataset[:] == {
        "text": ["fine", "so, so", "TRUE"],
        "label": ["1", "2.5", "3"],
        "when": ["2026-01-02", "2026-01-02T03:04:00", ""],
    }
    assert rows.origin == snapshot("a.xlsx (sheet 'Sheet', the first of 2)")
    workbook("one.xlsx", ["text;label"], ["fine;good"])
    assert "tr ';'" not in refusal(both("one.xlsx"), TWO)  # which would write into a zip file
    bare = loaded({**both("a.xlsx"), "header": False}, {"text": "0", "label": "1"})["train"].dataset
    assert bare[0] == {"text": "text", "label": "label"}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([["text", "label"], ["=1+1", 3]], "cell A2 holds a formula without a value; next: open and save it in a"),
        ([["text", "label"], ["a", "#N/A"]], "cell B2 holds the error #N/A; allowed: values"),
        ([["text", "text"], ["a", 3]], "its first line names the column 'text' twice"),
        (
            [["text", "label"], ["a", 3, "more"]],
            "row 2 of the sheet has 3 values and the header 2; allowed: a value only",
        ),
        ([["text", "label"]], "holds no rows; allowed: at least one"),
        ([], "the first sheet holds no rows; allowed: at least one"),
    ],
)
def test_a_sheet_that_is_no_table_is_refused(rows: list[list[object]], line: str) -> None:
    workbook("a.xlsx", *rows)
    assert refusal(both("a.xlsx"), TWO).startswith(f"a.xlsx: {line}")


def test_a_workbook_that_says_a_wrong_size_is_read_whole() -> None:
    workbook("right.xlsx", ["text", "label"], ["fine", "good"], ["broken", "bad"])
    with zipfile.ZipFile("right.xlsx") as right, zipfile.ZipFile("a.xlsx", "w") as wrong:
        for name in right.namelist():
            wrong.writestr(name, right.read(name).replace(b'ref="A1:B3"', b'ref="A1"'))
    assert loaded(both("a.xlsx"), TWO)["train"].dataset[:] == {"text": ["fine", "broken"], "label": ["good", "bad"]}


def test_a_workbook_needs_openpyxl(monkeypatch: pytest.MonkeyPatch) -> None:
    workbook("a.xlsx", ["text", "label"], ["a", 1])
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert refusal(both("a.xlsx"), TWO) == snapshot(
        "a.xlsx: reading .xlsx needs openpyxl; next: pip install 'openpyxl>=3.1'"
    )
    Path("b.xlsx").write_bytes(b"PK\x03\x04 and no more")
    monkeypatch.undo()
