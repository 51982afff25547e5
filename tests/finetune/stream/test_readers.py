"""Every row of every format is read once, from any place in its file, and a broken one is told apart."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import formats, load
from hf_mps.finetune.recipe.schema import Data
from hf_mps.finetune.stream import files
from hf_mps.finetune.stream.files import Broken
from tests.finetune.stream import corpora

KINDS = ("jsonl", "csv", "tsv", "txt", "parquet")


def opened(path: Path) -> tuple[files.File, tuple[files.FileSlice, ...]]:
    found = files.of_pattern(str(path), "data")
    return found[0], files.cut(found)


@pytest.mark.parametrize("kind", KINDS)
def test_each_piece_of_a_file_goes_on_from_behind_any_row(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SPAN", 100)  # a file of a few hundred bytes has several pieces
    file, pieces = opened(corpora.write(tmp_path, "rows", range(30), kind))
    assert len(pieces) > 1 or kind in ("csv", "tsv")
    texts = []
    for piece in pieces:
        rows = list(files.read(file, piece, None, ["text"]))
        texts += [row["text"] for _, row in rows if not isinstance(row, Broken)]
        for number, (place, _) in enumerate(rows):
            assert list(files.read(file, piece, place, ["text"])) == rows[number + 1 :]
    assert texts == [f"row {number}" for number in range(30)]


def test_lines_of_any_length_belong_to_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    lines = ["a", "", "b" * 50, "c", "d" * 9, "no break at the end"]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    file = files.of_pattern(str(path), "data")[0]
    for size in range(1, file.size + 1):
        edges = [*range(0, file.size, size), file.size]
        pieces = [files.FileSlice(0, *edge) for edge in pairwise(edges)]
        read: list[Any] = [row for piece in pieces for _, row in files.read(file, piece, None, ())]
        assert [row["text"] for row in read] == lines


def test_a_packed_file_is_one_piece(tmp_path: Path) -> None:
    plain = corpora.write(tmp_path, "rows", range(5))
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    file, (piece,) = opened(packed)
    rows = list(files.read(file, piece, None, ()))
    assert [row["n"] for _, row in rows if not isinstance(row, Broken)] == [0, 1, 2, 3, 4]
    assert list(files.read(file, piece, rows[2][0], ())) == rows[3:]


def test_a_text_in_quotation_marks_may_have_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text;n\n"a\nb; ""c""";1\nd;2\n', encoding="utf-8")
    file, (piece,) = opened(path)
    rows = list(files.read(file, piece, None, ()))
    assert [row for _, row in rows] == [{"text": 'a\nb; "c"', "n": "1"}, {"text": "d", "n": "2"}]
    assert list(files.read(file, piece, rows[0][0], ())) == rows[1:]


def test_broken_rows_are_told_with_their_line(tmp_path: Path) -> None:
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_bytes(b'{"text": "a"}\n{"text": \n[1]\n\n"x"\n{"text": "\xff"}\n{"text": "b"}')
    table = tmp_path / "rows.csv"
    table.write_bytes(b"text,n\na,1\nb\n\xff,2\nc,3\n")
    text = tmp_path / "rows.txt"
    text.write_bytes(b"a\n\xff\nb\n")
    told = []
    for path in (jsonl, table, text):
        file, (piece,) = opened(path)
        for place, row in files.read(file, piece, None, ()):
            if isinstance(row, Broken):
                told.append(f"{Path(files.place_of(file, piece, place)).name} {row.why}")
    assert told == snapshot(
        [
            "rows.jsonl: line 2 is no JSON: Expecting value (column 9)",
            "rows.jsonl: line 3 is a list; allowed: an object with the columns as its keys",
            "rows.jsonl: line 6 is not UTF-8",
            "rows.csv: line 3 has 1 field and the header 2",
            "rows.csv: line 4 is not UTF-8",
            "rows.txt: line 2 is not UTF-8",
        ]
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,n\na,1\n  \n""\n\nb,2\n'),
        ("a.csv", "text,n\ra,1\rb,2"),
        ("a.csv", "\ufefftext;n\r\n'a', b;1\r\n\r\nb;2\r\n"),
        ("a.tsv", 'text\tn\n"a\t1\nb"\t2\n'),
        ("a.txt", "a\rb\r\r\nc\n"),
        ("a.jsonl", '{"text": "a"}\r\n\u00a0\n{"text":\r"b"}\r\n'),
    ],
)
def test_a_file_has_the_rows_that_it_has_where_it_is_loaded_whole(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode())
    whole = load.reading(Data(files={"train": str(path)}, hold_out=0.5), path, name, formats.kind(path) or "", ["text"])
    file, pieces = opened(path)
    rows = [row for piece in pieces for row in files.read(file, piece, None, ())]
    assert [row for _, row in rows] == [row for table in whole.make() for row in table.to_pylist()]
    for number, (place, _) in enumerate(rows):
        assert list(files.read(file, pieces[-1], place, ())) == rows[number + 1 :]


def test_what_no_row_of_a_table_may_be_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('n,text\n1,a\0b\n2,b\n3,"c\n4,d\n', encoding="utf-8")
    file, (piece,) = opened(path)
    assert [row for _, row in files.read(file, piece, None, ())] == [
        Broken("holds a NUL character"),
        {"n": "2", "text": "b"},
        Broken("opens a quotation mark that is never closed"),
    ]
    path.write_bytes(b"n,t\xffxt\n1,a\n")
    file, (piece,) = opened(path)
    with pytest.raises(UserError, match="its first line is not UTF-8; allowed: text without, saved as UTF-8"):
        list(files.read(file, piece, None, ()))


def test_a_role_reaches_into_a_column_of_dicts() -> None:
    row = {"translation": {"en": "a", "de": "b"}, "x.y": "c"}
    assert files.pick(row, {"source": "translation.en", "other": "x.y"}) == {"source": "a", "other": "c"}
    assert files.pick(row, {"source": "translation.fr"}) == Broken("has no translation.fr")


def test_what_cannot_be_streamed_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('[{"text": "a"}]', encoding="utf-8")
    (tmp_path / "sheet.xlsx").write_text("x", encoding="utf-8")
    (tmp_path / "wrong.parquet").write_text("PAR1 but no more", encoding="utf-8")
    lines = []
    for name in ("list.json", "none-*.jsonl", "sheet.xlsx"):
        look = files.of_pattern if name == "list.json" else files.check
        with pytest.raises(UserError) as refused:
            look(str(tmp_path / name), "data.files.train")
        lines.append(str(refused.value).replace(str(tmp_path), "."))
    with pytest.raises(UserError) as refused:
        list(
            files.read(
                files.of_pattern(str(tmp_path / "wrong.parquet"), "data")[0], files.FileSlice(0, 0, -1), None, ()
            )
        )
    lines.append(str(refused.value).partition("wrong.parquet: ")[2].partition(":")[0])
    assert lines == snapshot(
        [
            "data.files.train: ./list.json: one list of rows cannot be streamed; next: jq -c '.[]' ./list.json >"
            " ./list.jsonl",
            "data.files.train: ./none-*.jsonl: there is no such file",
            "data.files.train: ./sheet.xlsx: cannot be streamed; allowed: .csv, .tsv, .json, .jsonl, .parquet, .txt,"
            " .tokens, of text also .gz",
            "cannot be read as parquet",
        ]
    )
