"""All readers together have each row once a pass, in an order of their own, and go on from any row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.finetune.stream import endless, files
from hf_mps.finetune.stream.endless import Reader, TooManyBroken, Windows
from tests.finetune.stream import corpora
from tests.refusals import refusal


@pytest.mark.parametrize("readers", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_no_row_is_read_twice_or_lost_in_a_pass(
    tmp_path: Path, readers: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SPAN", 100)
    for number in range(3):
        corpora.write(tmp_path, f"rows-{number}", range(40 * number, 40 * number + 40), kind)
    read = corpora.reading(tmp_path / f"rows-*.{kind}")
    for passed in range(2):
        seen: list[int] = []
        for number in range(readers):
            reader = Reader(read, number, readers)
            for row in reader:
                if reader.places[0].passed > passed:
                    break
                if reader.places[0].passed == passed:
                    seen.append(int(row["text"].split()[1]))
        assert sorted(seen) == list(range(120))


def test_each_pass_has_another_order(tmp_path: Path) -> None:
    for number in range(8):
        corpora.write(tmp_path, f"rows-{number}", [number])
    rows = corpora.numbers(Reader(corpora.reading(tmp_path / "*.jsonl"), 0, 1), 24)
    passes = [rows[at : at + 8] for at in (0, 8, 16)]
    assert all(sorted(one) == list(range(8)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


@pytest.mark.parametrize("stop", [0, 1, 17, 60, 61, 100])
def test_a_lane_goes_on_behind_any_row(tmp_path: Path, stop: int) -> None:
    corpora.write(tmp_path, "a", range(50))
    corpora.write(tmp_path, "b", range(100, 111), "parquet")
    read = corpora.reading(tmp_path / "a.jsonl", tmp_path / "b.parquet", weights=(3, 1))
    whole = corpora.numbers(Reader(read, 1, 2), 200)
    reader = Reader(read, 1, 2)
    begun = iter(reader)
    first = corpora.numbers(begun, stop)
    state = json.loads(json.dumps(reader.state()))
    rest = corpora.numbers(Reader(read, 1, 2).load(state), 200 - stop)
    assert first + rest == whole


def test_sources_are_drawn_by_their_weights(tmp_path: Path) -> None:
    for place, name in enumerate("abc"):
        corpora.write(tmp_path, name, range(1000 * place, 1000 * place + 50))
    read = corpora.reading(*(tmp_path / f"{name}.jsonl" for name in "abc"), weights=(6, 3, 1))
    found = Counter(number // 1000 for number in corpora.numbers(Reader(read, 0, 1), 4000))
    shares = [found[place] / 4000 for place in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_held_out_rows_are_the_same_for_every_reader_and_never_trained_on(tmp_path: Path) -> None:
    corpora.write(tmp_path, "a", range(150))
    corpora.write(tmp_path, "b", range(150, 400), "parquet")
    held: set[int] = set()
    for patterns in ((tmp_path / "a.jsonl", tmp_path / "b.parquet"), (tmp_path / "b.parquet", tmp_path / "a.jsonl")):
        read = corpora.reading(*patterns, hold_out=0.2)
        validation = corpora.numbers(endless.validation(read, read.corpora, 1000, held=True), 1000)
        held = held or set(validation)
        assert set(validation) == held
        trained = {number for one in range(3) for number in corpora.numbers(Reader(read, one, 3), 400)}
        assert trained == set(range(400)) - held
    assert len(held) == pytest.approx(80, abs=25)


def test_a_window_mixes_its_rows_and_loses_none(tmp_path: Path) -> None:
    corpora.write(tmp_path, "rows", range(60))
    rows = corpora.numbers(Windows(Reader(corpora.reading(tmp_path / "rows.jsonl"), 0, 1), 20, seed=1), 60)
    windows = [rows[at : at + 20] for at in (0, 20, 40)]
    assert [sorted(window) for window in windows] == [list(range(at, at + 20)) for at in (0, 20, 40)]
    assert all(window != sorted(window) for window in windows)
    assert [number - windows[0][0] for number in windows[0]] != [number - windows[1][0] for number in windows[1]]


@pytest.mark.parametrize("stop", [0, 1, 19, 20, 21, 130])
def test_a_window_is_made_again(tmp_path: Path, stop: int) -> None:
    corpora.write(tmp_path, "rows", range(50))
    read = corpora.reading(tmp_path / "rows.jsonl")
    whole = corpora.numbers(Windows(Reader(read, 0, 1), 20, 1), 150)
    windows = Windows(Reader(read, 0, 1), 20, 1)
    first = corpora.numbers(iter(windows), stop)
    state = json.loads(json.dumps(windows.state()))
    assert first + corpora.numbers(Windows(Reader(read, 0, 1), 20, 1, state), 150 - stop) == whole


def test_broken_rows_are_skipped_up_to_the_stated_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpora.write(tmp_path, "rows", range(20))
    path.write_text(path.read_text(encoding="utf-8") + '{"n": 1}\n{"text": 3}\nno JSON\n', encoding="utf-8")
    reader = Reader(corpora.reading(path), 0, 1)
    assert corpora.numbers(reader, 41) == [*range(20), *range(20), 0]
    assert (reader.tally.rows, reader.tally.broken) == (47, 6)
    assert [line.partition("rows.jsonl: ")[2] for line in reader.told] == snapshot(
        [
            "line 21 has no text",
            "line 22 has int for data.columns.text; allowed: text",
            "line 23 is no JSON: Expecting value (column 1)",
            "line 21 has no text",
            "line 22 has int for data.columns.text; allowed: text",
        ]
    )

    monkeypatch.setattr(endless, "LEAST", 20)
    with pytest.raises(TooManyBroken) as ended:
        corpora.numbers(Reader(corpora.reading(path, broken=0.1), 0, 1), 41)
    assert str(ended.value).partition("rows.jsonl: ")[2] == snapshot(
        "line 23 is no JSON: Expecting value (column 1); 3 of 23 rows are broken,"
        " data.max_bad_row_fraction=0.1 allows fewer; next: repair them, or a larger data.max_bad_row_fraction"
    )


def test_too_few_rows_for_the_readers_is_said(tmp_path: Path) -> None:
    path = corpora.write(tmp_path, "rows", range(2))
    assert refusal(corpora.numbers, Reader(corpora.reading(path), 4, 5), 1).partition("rows.jsonl: ")[2] == snapshot(
        "too few rows for 5 readers, reader 5 has none; next: training.dataloader_num_workers=0, or fewer processes"
    )
