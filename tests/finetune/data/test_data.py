"""Where rows come from, and that their columns arrive as they are: nested JSON, lines of text, folders, splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for
from inline_snapshot import snapshot
from PIL import Image

from hf_mps.finetune.data.rows import Rows
from tests.finetune.readers import both, loaded, refusal

pytestmark = pytest.mark.usefixtures("in_own_folder")

SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Oslo",
            "paragraphs": [
                {
                    "context": "Ada lives in Oslo.",
                    "qas": [
                        {"id": "a", "question": "Where?", "answers": [{"text": "Oslo", "answer_start": 13}]},
                        {"id": "b", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]},
                    ],
                },
                {"context": "It rains.", "qas": [{"id": "c", "question": "Does it?", "answers": []}]},
            ],
        }
    ],
}


def test_rows_inside_json_come_out_with_what_stands_around_them(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD), encoding="utf-8")
    said = {**both("squad.json"), "field": "data.paragraphs.qas"}
    columns = {name: name for name in ("id", "question", "context", "title", "answers")}
    rows = loaded(said, columns)["train"].dataset
    assert rows["id"][:] == ["a", "b", "c"]
    assert rows["context"][:] == ["Ada lives in Oslo.", "Ada lives in Oslo.", "It rains."]
    assert rows["title"][:] == ["Oslo"] * 3
    assert rows[0]["answers"] == [{"text": "Oslo", "answer_start": 13}]
    # Another content of the same file is read anew.
    changed = json.loads(json.dumps(SQUAD))
    changed["data"][0]["title"] = "Lima"
    (tmp_path / "squad.json").write_text(json.dumps(changed), encoding="utf-8")
    assert loaded(said, columns)["train"].dataset["title"][:] == ["Lima"] * 3


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("data.paragraph", ": no 'paragraph' among title, paragraphs; did you mean 'paragraphs'?"),
        ("version", " leads to a str; allowed: lists of dicts"),
        ("data.paragraphs.qas.answers.text", " leads to a str; allowed: lists of dicts"),
    ],
)
def test_a_field_that_leads_nowhere_is_refused(tmp_path: Path, field: str, line: str) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD), encoding="utf-8")
    assert refusal({**both("squad.json"), "field": field}, {"id": "id"}) == f"squad.json: data.field {field}{line}"


def test_a_field_is_for_json_alone_and_broken_json_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n", encoding="utf-8")
    assert refusal({**both("rows.csv"), "field": "data"}, {"a": "a"}) == snapshot(
        "data.files.train: rows.csv: data.field is for JSON; allowed: .json, .jsonl"
    )
    (tmp_path / "rows.json").write_text('{"data": [', encoding="utf-8")
    told = refusal({**both("rows.json"), "field": "data"}, {"a": "a"})
    assert told.startswith("rows.json: is no JSON: Expecting value (column 11)")
    (tmp_path / "none.json").write_text('{"data": []}', encoding="utf-8")
    told = refusal({**both("none.json"), "field": "data"}, {"a": "a"})
    assert told == snapshot("none.json: data.field data holds no rows; allowed: at least one")


def test_lists_and_dicts_of_json_keep_their_types_and_a_dot_names_a_key(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "translation": {"en": "hi", "ro": "salut"}, "score": 1.5},
        {"messages": [{"role": "user", "content": "yes"}], "translation": {"en": "yes", "ro": "da"}, "score": 2.0},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    columns = {"chat": "messages", "source": "translation.en", "target": "translation.ro", "score": "score"}
    found = loaded(both("rows.json"), columns)["validation"].dataset
    assert found.column_names == ["chat", "source", "target", "score"]
    assert found[1] == {"chat": rows[1]["messages"], "source": "yes", "target": "da", "score": 2.0}
    assert refusal(both("rows.json"), {"source": "translation.fr"}) == snapshot(
        "rows.json: there is no column 'translation.fr' for data.columns.source; the columns are messages,"
        " translation.en, translation.ro, score; did you mean 'translation.ro'?; next: data.columns.source=NAME"
        " for the one that it is"
    )


@pytest.mark.parametrize("ending", ["txt", "tokens"])
def test_a_text_file_has_a_row_for_each_line(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"wiki.{ending}").write_text(" = Oslo = \n\nIt rains .\n", encoding="utf-8")
    rows = loaded(both(f"wiki.{ending}"), {"text": "text"})["train"].dataset
    assert rows["text"][:] == [" = Oslo = ", "", "It rains ."]


def test_further_splits_are_read_and_cut_as_validation_is(tmp_path: Path) -> None:
    for name, count in (("train", 6), ("dev", 5), ("test", 4)):
        (tmp_path / f"{name}.csv").write_text("text\n" + "a\n" * count, encoding="utf-8")
    files = {"test": "test.csv", "train": "train.csv", "validation": "dev.csv"}
    found = loaded({"files": files, "rows": {"train": 5, "validation": 3}}, {"text": "text"})
    assert {split: len(rows.dataset) for split, rows in found.items()} == {"train": 5, "validation": 3, "test": 3}
    assert list(found) == ["train", "validation", "test"]


def content(rows: Rows, role: str) -> bytes:
    return rows.content_of(rows.dataset[0][role], 0, role)


def test_images_and_sound_of_a_folder_stay_undecoded(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for kind in ("cat", "dog"):
            (tmp_path / "animals" / split / kind).mkdir(parents=True)
            Image.new("RGB", (2, 2)).save(tmp_path / "animals" / split / kind / "1.png")
    found = loaded({"folder": "animals"}, {"image": "image", "label": "label"})
    first = found["train"].dataset[0]
    file = tmp_path / "animals/train/cat/1.png"
    assert first == {"image": str(file.resolve()), "label": "cat"}
    assert content(found["train"], "image") == file.read_bytes()
    assert found["validation"].where == "animals/test"

    speech = tmp_path / "speech" / "train"
    speech.mkdir(parents=True)
    for name in ("one.wav", "lost.wav"):
        (speech / name).write_bytes(b"RIFF")
    (speech / "metadata.csv").write_text("file_name,text\none.wav,hello\n", encoding="utf-8")
    (tmp_path / "speech" / "val").mkdir()
    (tmp_path / "speech" / "val" / "two.wav").write_bytes(b"RIFF2")
    (tmp_path / "speech" / "val" / "metadata.csv").write_text("file_name,text\ntwo.wav,you\n", encoding="utf-8")
    found = loaded({"folder": "speech"}, {"audio": "audio", "text": "text"})
    assert found["train"].dataset["text"][:] == ["hello"]
    notes = [found[split].notes for split in ("train", "validation")]
    assert notes == [("without 1 file that metadata.csv does not name, as lost.wav",), ()]
    assert content(found["validation"], "audio") == b"RIFF2"
    assert found["validation"].textual
    (tmp_path / "speech" / "val" / "metadata.csv").write_text("file,text\ntwo.wav,you\n", encoding="utf-8")
    assert refusal({"folder": "speech"}, {"audio": "audio", "text": "text"}) == snapshot(
        "speech/val/metadata.csv: there is no column file_name, which names the files; the columns are file, text"
    )


def test_what_a_folder_holds_beside_its_classes_is_told_of(tmp_path: Path) -> None:
    place = tmp_path / "photos/train/sky"
    place.mkdir(parents=True)
    for name in ("a.png", "IMG_1.HEIC", ".DS_Store"):
        (place / name).touch()
    held = {"folder": "photos", "hold_out": 0.5}
    (tmp_path / "photos/train/grass").mkdir()
    (tmp_path / "photos/train/grass/b.png").touch()
    found = loaded(held, {"image": "image", "label": "label"})["train"]
    assert found.notes == ("without 1 file of another kind, as IMG_1.HEIC",)
    (tmp_path / "photos/train/lost.png").touch()
    assert refusal(held, {"image": "image", "label": "label"}) == (
        "photos/train/lost.png: is in no folder of a class; allowed: a folder for each class, with its files"
    )
    without_classes = loaded(held, {"image": "image"})
    assert sum(len(rows.dataset) for rows in without_classes.values()) == 3


def test_sound_in_a_folder_for_each_class_needs_no_decoder(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "sounds" / split / "yes").mkdir(parents=True)
        (tmp_path / "sounds" / split / "yes" / "1.wav").write_bytes(b"RIFF")
    found = loaded({"folder": "sounds"}, {"audio": "audio", "label": "label"})
    assert found["train"].dataset["label"][:] == ["yes"]
    assert content(found["train"], "audio") == b"RIFF"


def test_a_folder_without_images_or_sound_is_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text("a", encoding="utf-8")
    assert refusal({"folder": "texts"}, {"image": "image"}) == snapshot(
        "texts/train: holds neither images nor sound; allowed: a folder for each class with files in it"
    )


TWO = {"text": "text", "label": "label"}


@pytest.mark.parametrize("separator", [",", ";", "\t", ", ", "; "])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_csv_is_read_with_what_separates_the_names_of_its_first_line(
    tmp_path: Path, separator: str, encoding: str
) -> None:
    text = 'text|label\n"one; two, and\tthree"|good\nnone|bad\n'.replace("|", separator)
    (tmp_path / "a.csv").write_text(text, encoding=encoding)
    rows = loaded(both("a.csv"), TWO)["train"].dataset
    assert rows[:] == {"text": ["one; two, and\tthree", "none"], "label": ["good", "bad"]}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'text,label\nfine,good\n"open,bad\n', "a quotation mark that opens in row 2 is never closed; next: close it"),
        (
            b"text,label\n" + 3000 * b"all is plain,good\n" + b"caf\xe9,bad\n",
            "is not UTF-8 text (byte 54014); next: iconv -f latin1 -t utf-8 a.csv > new.csv",
        ),
        (
            "text,label\nfine,good\n".encode("utf-16"),
            "is not UTF-8 text (byte 0); next: iconv -f utf-16 -t utf-8 a.csv > new.csv",
        ),
    ],
    ids=["an open quotation mark", "latin letters far below", "utf-16"],
)
def test_a_broken_csv_is_told_in_our_words(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert refusal(both("a.csv"), TWO) == f"a.csv: {line}"


def test_too_few_rows_to_hold_some_out_are_refused_with_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,0\nb,1\nc,0\n", encoding="utf-8")
    assert refusal({"files": {"train": "a.csv"}, "hold_out": 0.1}, TWO) == snapshot(
        "a.csv: data.hold_out=0.1 of 3 rows leaves one split without rows; next: more rows, or a separate"
        " validation split"
    )
