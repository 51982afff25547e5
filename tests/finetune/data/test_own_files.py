"""Files as people have them: without a header, packed, from a spreadsheet, in CoNLL's columns; and broken ones."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import datasets
import pytest
from inline_snapshot import snapshot
from pydantic import ValidationError

from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.recipe.schema import Data
from hf_mps.finetune.run import run_dir
from hf_mps.finetune.tasks import token_classification
from tests.finetune.readers import both, loaded, refusal

pytestmark = pytest.mark.usefixtures("in_own_folder")

TWO = {"text": "text", "label": "label"}
PLAIN = "text,label\nfine,good\nbroken,bad\n"
READ = {"text": ["fine", "broken"], "label": ["good", "bad"]}
FIT = "and the header 2; allowed: as many in each, a text with a separator inside in quotation marks"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("text,label\nwell, good,1\nnow, then,0\n", f"row 1 (line 2) has 3 fields {FIT}"),
        ("text,label\na, b,1\nc,0\nd,1\n", f"row 1 (line 2) has 3 fields {FIT}"),
        ('text,label\n"two\nlines",1\nc,0,0\n', f"row 2 (line 4) has 3 fields {FIT}"),
        ("text,label\nfine\nbad,1\n", f"row 1 (line 2) has 1 field {FIT}"),
        (
            "text,label\nfine,1\nbro",
            "the file ends in the middle of row 2, which has 1 field and the header 2; next: fetch it again",
        ),
        ("text,label\nfi\0ne,1\n", "line 2 holds a NUL character; allowed: text without, saved as UTF-8"),
        ('text,"label\nfine,1\n', "a quotation mark that opens in the first line is never closed; next: close it"),
        ("\n\n", "its first line names no columns; allowed: a name for each"),
    ],
    ids=["all longer", "the first longer", "after one of two lines", "shorter", "cut off", "NUL", "header", "blank"],
)
def test_a_csv_whose_rows_do_not_fit_its_header_is_refused_with_the_row_and_both_counts(
    content: str, line: str
) -> None:
    Path("a.csv").write_text(content, encoding="utf-8")
    assert refusal(both("a.csv"), TWO) == f"a.csv: {line}"


def test_a_csv_that_ends_without_a_line_break_is_told_of() -> None:
    Path("a.csv").write_text(PLAIN.rstrip("\n"), encoding="utf-8")
    rows = loaded(both("a.csv"), TWO)["train"]
    assert rows.dataset[:] == READ
    assert rows.origin == snapshot("a.csv (ends without a line break: is its last row whole?)")
    Path("a.csv").write_text(PLAIN, encoding="utf-8")
    assert loaded(both("a.csv"), TWO)["train"].origin == "a.csv"


def test_a_csv_that_pandas_wrote_with_its_index_is_read() -> None:
    Path("a.csv").write_text(",text,label\n0,fine,good\n1,broken,bad\n", encoding="utf-8")
    assert loaded(both("a.csv"), TWO)["train"].dataset[:] == READ


def test_a_csv_with_a_field_of_megabytes_is_read_and_the_process_keeps_its_limit() -> None:
    before = csv.field_size_limit()
    long = "word " * 100_000
    Path("a.csv").write_text(f"text,label\n{long},good\nb,bad\n", encoding="utf-8")
    assert loaded(both("a.csv"), TWO)["train"].dataset["text"][0] == long
    assert csv.field_size_limit() == before


def test_a_csv_without_a_header_has_numbers_for_columns(tmp_path: Path) -> None:
    # As AG News is published: class, title, text.
    Path("ag.csv").write_text(
        '"3","Markets, calm","Nothing fell; all rose"\n"1","Talks","They go on"\n', encoding="utf-8"
    )
    said = {**both("ag.csv"), "header": False}
    rows = loaded(said, {"text": "2", "label": "0"})["train"].dataset
    assert rows[:] == {"text": ["Nothing fell; all rose", "They go on"], "label": ["3", "1"]}
    assert refusal(said, {"text": "3", "label": "0"}) == snapshot(
        "ag.csv: there is no column '3' for data.columns.text; the columns are 0 to 2, counted from 0; next:"
        " data.columns.text=NUMBER"
    )
    assert refusal(both("ag.csv"), {"words": "body"}) == snapshot(
        "ag.csv: there is no column 'body' for data.columns.words; the columns are 3, Markets, calm, Nothing"
        " fell; all rose; next: data.columns.words=NAME for the one that it is, or data.header=false where the"
        " first line is a row"
    )
    Path("a.json").write_text("[]", encoding="utf-8")
    assert refusal({**both("a.json"), "header": False}, TWO) == snapshot(
        "data.files.train: a.json: data.header is for tables; allowed: .csv, .tsv, .xlsx"
    )
    with pytest.raises(ValidationError, match="header, which belongs to files, beside hub; leave header out"):
        Data.model_validate({"hub": "ag_news", "header": False})


def test_a_column_is_named_by_its_number_on_the_command_line() -> None:
    said = load_recipe("text-classification", ["data.train=ag.csv", "data.header=false", "data.text=2", "data.label=0"])
    assert said.recipe.data.columns.roles() == {"text": "2", "label": "0"}
    words = ["data.train=a.csv", "data.header=false", "data.context=1", "data.start=null", "data.label=0"]
    said = load_recipe("multiple-choice/swag", [*words, "data.columns.choices=[2, 3]"])
    assert said.recipe.data.columns.roles() == {"context": "1", "choice_0": "2", "choice_1": "3", "label": "0"}


@pytest.mark.parametrize("name", ["a.csv.gz", "A.CSV.GZ", "a.tsv.gz", "a.jsonl.gz", "a.json.gz"])
def test_a_packed_file_is_read_as_it_is(name: str) -> None:
    rows = [dict(zip(READ, row, strict=True)) for row in zip(*READ.values(), strict=True)]
    texts = {"csv": PLAIN, "tsv": PLAIN.replace(",", "\t"), "json": json.dumps(rows)}
    texts["jsonl"] = "\n".join(map(json.dumps, rows))
    Path(name).write_bytes(gzip.compress(texts[name.lower().split(".")[1]].encode()))
    assert loaded(both(name), TWO)["train"].dataset[:] == READ


def test_a_file_that_is_something_else_than_its_name_says_is_refused_with_the_way_on() -> None:
    packed = gzip.compress(PLAIN.encode() * 50)
    Path("a.csv").write_bytes(packed)
    assert refusal(both("a.csv"), TWO) == snapshot(
        "a.csv: is a gzip file, though its name does not say so; next: mv a.csv a.csv.gz"
    )
    Path("a.csv.gz").write_bytes(packed[: len(packed) // 2])
    assert refusal(both("a.csv.gz"), TWO) == snapshot(
        "a.csv.gz: the gzip file cannot be unpacked, it is cut off or damaged; next: fetch or pack it again"
    )
    Path("b.csv.gz").write_text(PLAIN, encoding="utf-8")
    assert refusal(both("b.csv.gz"), TWO).startswith("b.csv.gz: is no gzip file, though its name says so; next: ")
    Path("b.csv").write_bytes(b"PK\x03\x04rest")
    assert refusal(both("b.csv"), TWO) == snapshot(
        "b.csv: is a zip file, though its name does not say so; next: a name that ends in .xlsx if it is a workbook"
    )


@pytest.mark.parametrize("name", ["a[1].csv", "a*.csv", "UP.CSV", "a b?.csv"])
def test_a_name_is_no_pattern_and_its_ending_may_be_in_capitals(name: str) -> None:
    Path(name).write_text(PLAIN, encoding="utf-8")
    assert loaded(both(name), TWO)["train"].dataset[:] == READ


@pytest.mark.parametrize("ending", ["json", "JSONL", "parquet"])
def test_a_pattern_in_a_name_is_no_pattern_in_other_formats_either(ending: str) -> None:
    made = datasets.Dataset.from_dict(READ)
    name = f"a[1].{ending}"
    made.to_parquet(name) if ending == "parquet" else made.to_json(name)
    assert loaded(both(name), TWO)["train"].dataset[:] == READ


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"text": "a", "label": 1}\n{"text": 2, "label": 1}\n', "row 2: 'text' is a number, and in row 1 a text;"),
        ('{"text": "a", "label": 1}\n{"text": "b", "la', "line 2 is no JSON: Unterminated string"),
        ('{"text": "a", "label": ' + "9" * 5000 + "}\n", "line 1 is no JSON: Exceeds"),
        ('{"text": "a", "label": ' + "9" * 40 + "}\n", "row 1: 'label' holds an integer of more than 64 bits;"),
        ('{"text": "a", "label": ' + "[" * 900 + "]" * 900 + "}\n", "row 1: 'label' is nested more than 32 deep;"),
        ("[" * 100_000 + "\n", "line 1 is no JSON: its values are nested too deep; next: write"),
        ("[1, 2]\n", "row 1 is a list; allowed: an object with the columns as its keys"),
        ('{"text": "\\ud800", "label": 1}\n', "row 1: 'text' holds half of a surrogate pair, which is no text;"),
    ],
    ids=["two kinds", "cut off", "5,000 digits", "40 digits", "900 deep", "without end", "a list", "surrogate"],
)
def test_json_that_is_no_table_is_refused_with_the_row(content: str, line: str) -> None:
    Path("a.jsonl").write_text(content, encoding="utf-8")
    said = refusal(both("a.jsonl"), TWO)
    assert said.startswith(f"a.jsonl: {line}")
    assert "\n" not in said


def test_json_is_read_as_it_stands() -> None:
    rows = [
        {"text": "2020-01-01", "label": 1, "other": [1, {"a": 2}]},
        {"text": "line\u2028break", "label": 2.5, "other": "free", "more": None},
    ]
    Path("a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8-sig")
    found = loaded(both("a.jsonl"), TWO)["train"].dataset
    assert found[:] == {"text": ["2020-01-01", "line\u2028break"], "label": [1.0, 2.5]}
    # Lines of JSON by the name of plain .json, as many data sets have them; and objects that differ.
    mixed = [{"said": [{"call": {"x": 1}}]}, {"said": [{"call": {"x": "one", "y": [2]}}]}]
    Path("a.json").write_text("\n".join(map(json.dumps, mixed)), encoding="utf-8")
    assert loaded(both("a.json"), {"said": "said"})["train"].dataset["said"][:] == [row["said"] for row in mixed]
    Path("b.json").write_text(json.dumps({"version": 1, "data": rows}), encoding="utf-8")
    assert refusal(both("b.json"), TWO) == snapshot(
        "b.json: is one object that holds the rows inside; next: data.field=data"
    )
    Path("c.json").write_text(json.dumps(mixed[0]), encoding="utf-8")
    assert loaded(both("c.json"), {"said": "said"})["train"].dataset["said"][:] == [mixed[0]["said"]]


def test_a_column_of_json_has_one_type_however_long_the_file_is() -> None:
    rows = [{"text": "a", "label": 1}] * 12_000 + [{"text": "b", "label": 0.5, "late": True}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = loaded(both("a.jsonl"), {**TWO, "late": "late"})["train"].dataset
    assert (found[0]["label"], found[12_000]) == (1.0, {"text": "b", "label": 0.5, "late": True})
    rows.append({"text": "c", "label": "high"})
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert refusal(both("a.jsonl"), TWO) == snapshot(
        "a.jsonl: row 12002: 'label' is a text, and in row 1 a number; allowed: one kind in all rows"
    )


def test_texts_that_are_empty_are_told_of_and_refused_where_all_are() -> None:
    Path("a.csv").write_text("text,label\n,0\nb,1\n  ,0\n", encoding="utf-8")
    assert loaded(both("a.csv"), TWO)["train"].origin == snapshot("a.csv (2 of 3 rows have an empty text)")
    Path("a.csv").write_text("text,label\n,0\n  ,0\n", encoding="utf-8")
    assert refusal(both("a.csv"), TWO) == snapshot("a.csv: every row has an empty text; allowed: text in the column")


def test_rows_are_read_once_and_again_where_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_mps.finetune.data import rows

    Path("a.csv").write_text(PLAIN, encoding="utf-8")
    first = loaded(both("a.csv"), TWO)["train"].dataset
    Path("moved").mkdir()
    Path("a.csv").rename("moved/b.csv")
    with monkeypatch.context() as patched:
        patched.setattr(rows, "_write", None)
        again = loaded(both("moved/b.csv"), TWO)["train"].dataset
    assert again[:] == first[:]
    assert again._fingerprint == first._fingerprint
    Path("moved/b.csv").write_text(PLAIN.replace("good", "great"), encoding="utf-8")
    assert loaded(both("moved/b.csv"), TWO)["train"].dataset["label"][:] == ["great", "bad"]


def test_a_class_is_named_once_in_a_recipe() -> None:
    with pytest.raises(ValidationError, match="has 'bad' twice; give each class once"):
        token_classification.Data.model_validate({**both("a.json"), "labels": ["bad", "good", "bad"]})


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (
            "a.tsv",
            "text,label\nfine,good\n",
            snapshot(
                "a.tsv: its first line is one column, 'text,label'; ',' separates its columns, and in .tsv a tab"
                " does; next: mv a.tsv a.csv"
            ),
        ),
        (
            "a.csv",
            "text:label\nfine:good\n",
            snapshot(
                "a.csv: its first line is one column, 'text:label'; if ':' separates its columns, write a comma"
                " instead; next: tr ':' , < a.csv > new.csv"
            ),
        ),
        ("a.json", "[]", snapshot("a.json: holds no rows; allowed: at least one")),
        ("a.jsonl", "\n\n", snapshot("a.jsonl: holds no rows; allowed: at least one")),
    ],
)
def test_what_looks_like_a_table_without_columns_says_why(name: str, content: str, line: str) -> None:
    Path(name).write_text(content)
    assert refusal(both(name), TWO) == line


def test_a_command_names_files_as_a_shell_reads_them() -> None:
    Path("my rows.tsv").write_text("text,label\nfine,good\n")
    assert refusal(both("my rows.tsv"), TWO).endswith("; next: mv 'my rows.tsv' 'my rows.csv'")
    with gzip.open("a.csv.gz", "wt", encoding="utf-8") as file:
        file.write("text:label\nfine:good\n")
    assert refusal(both("a.csv.gz"), TWO).endswith("; next: tr ':' , < <(gzip -dc a.csv.gz) > new.csv")
    with gzip.open("b.csv.gz", "wt", encoding="latin1") as file:
        file.write("text,label\nfiné,good\n")
    assert refusal(both("b.csv.gz"), TWO).endswith("; next: iconv -f latin1 -t utf-8 <(gzip -dc b.csv.gz) > new.csv")


def test_a_bar_separates_the_columns_of_a_csv() -> None:
    Path("a.csv").write_text("text|label\nfine, really|good\nbroken|bad\n")
    assert loaded(both("a.csv"), TWO)["train"].dataset.to_dict()["text"] == ["fine, really", "broken"]


def test_a_pipe_a_folder_and_a_link_to_nothing_are_named_for_what_they_are() -> None:
    os.mkfifo("pipe.csv")
    Path("folder.csv").mkdir()
    Path("link.csv").symlink_to("gone.csv")
    assert [refusal(both(name), TWO) for name in ("pipe.csv", "folder.csv", "link.csv")] == snapshot(
        [
            "data.files.train: pipe.csv: is no regular file, and rows are read more than once; next: cat"
            " pipe.csv > rows.csv",
            "data.files.train: folder.csv: is a folder; allowed: a file of rows (.csv, .tsv, .json, .jsonl,"
            " .parquet, .xlsx, .conll, .conllu, .txt, .tokens)",
            "data.files.train: link.csv: is a link to gone.csv, which is not there; allowed: a file",
        ]
    )


def test_a_pattern_reads_all_of_its_files_in_the_order_of_their_names() -> None:
    Path("shards").mkdir()
    for number, text in ((1, "broken"), (0, "fine")):
        Path(f"shards/train-{number}.csv").write_text(f"text,label\n{text},{number}\n", encoding="utf-8")
    rows = loaded(both("shards/train-*.csv"), TWO)["train"]
    assert rows.dataset.to_dict() == {"text": ["fine", "broken"], "label": ["0", "1"]}
    assert (rows.where, rows.textual) == ("shards/train-*.csv", True)
    digests = [run_dir._files(Data.model_validate(both(name)))["train"] for name in ("shards/train-0.csv", "shards/*")]
    assert len(set(digests)) == 2  # a run goes on with the same content of all files alone
    Path("shards/train-2.csv").write_text("text,topic\nso,so\n", encoding="utf-8")
    Path("train-0.csv").write_text(PLAIN, encoding="utf-8")
    Path("shards/train-3.csv").touch()
    said = [refusal(both(name), TWO) for name in ("shards/train-[12].csv", "**/train-0.csv", "shards/*", "shards")]
    assert said == snapshot(
        [
            "shards/train-2.csv has other columns, or of other types, than shards/train-1.csv; allowed: alike"
            " files in one folder",
            "train-0.csv is in another folder than shards/train-0.csv; allowed: alike files in one folder",
            "data.files.train: shards/train-3.csv: the file is empty; allowed: at least one row",
            "data.files.train: shards: is a folder; allowed: a file of rows (.csv, .tsv, .json, .jsonl, .parquet,"
            " .xlsx, .conll, .conllu, .txt, .tokens), or several, as 'shards/*.csv'",
        ]
    )


def test_a_folder_of_rows_and_columns_in_place_of_rows_are_named_for_what_they_are() -> None:
    Path("rows").mkdir()
    Path("rows/a.csv").write_text(PLAIN, encoding="utf-8")
    Path("pandas.json").write_text(
        '{"text": {"0": "fine", "1": "broken"}, "label": {"0": 1, "1": 0}}', encoding="utf-8"
    )
    said = [refusal(data, TWO) for data in ({"folder": "rows"}, both("pandas.json"), {"hub": "rows", "config": "x"})]
    assert said == snapshot(
        [
            "data.folder: rows holds rows, no images or sound; next: data.train='rows/*.csv'",
            "pandas.json: is one object of columns, as pandas' to_json writes by default; next: to_json(FILE,"
            " orient='records') writes rows",
            "data rows x train: the folder cannot be read: BuilderConfig 'x' not found. Available: ['default'];"
            " next: give files with data.files.train=PATH data.files.validation=PATH",
        ]
    )


@pytest.mark.parametrize("content", ['{"text": ["fine", "broken"], "label": [1, 0]}', '{"text":["fine"]}'])
def test_one_json_object_of_lists_is_read_as_columns(content: str) -> None:
    Path("lists.json").write_text(content, encoding="utf-8")
    columns = json.loads(content)
    assert loaded(both("lists.json"), {role: role for role in columns})["train"].dataset.to_dict() == columns


def test_a_json_object_of_lists_that_is_one_row_stays_one_and_columns_of_two_lengths_are_refused() -> None:
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}
    tagged = {"words": ["Oslo", "is"], "tags": ["B", "O"]}
    for row in (talk, tagged):
        Path("one.json").write_text(json.dumps(row), encoding="utf-8")
        columns = {role: role for role in row}
        assert loaded(both("one.json"), columns)["train"].dataset[0] == row
        Path("one.json").write_text(json.dumps({role: [value] for role, value in row.items()}), encoding="utf-8")
        assert loaded(both("one.json"), columns)["train"].dataset[0] == row
    Path("uneven.json").write_text('{"text": ["fine", "broken"], "label": [1]}', encoding="utf-8")
    assert refusal(both("uneven.json"), TWO) == snapshot(
        "uneven.json: is one object of columns of different lengths (text 2, label 1); allowed: as many in each"
    )


def test_one_shard_of_several_is_told_of_when_it_is_read_alone(recwarn: pytest.WarningsRecorder) -> None:
    for name in ("train-00000-of-00002.csv", "train-00001-of-00002.csv", "only-00000-of-00001.csv"):
        Path(name).write_text(PLAIN, encoding="utf-8")
    loaded(both("only-00000-of-00001.csv"), TWO)
    assert len(loaded(both("train-*-of-00002.csv"), TWO)["train"].dataset) == 4
    assert not recwarn.list
    loaded(both("train-00001-of-00002.csv"), TWO)
    assert [str(one.message) for one in recwarn.list] == snapshot(
        [
            "hf_mps: train-00001-of-00002.csv is one of 2 shards, and is read alone; all: 'train-*-of-00002.csv'",
        ]
    )
