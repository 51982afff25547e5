"""Rows, images and sound as hypothesis draws them, whole and broken: read as they are, or refused in one line."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import json_rows, tables
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import audio, images
from tests.finetune import strategies
from tests.finetune.strategies import cases

RATE = 16_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all cases; each writes over the file of the one before."""
    return tmp_path_factory.mktemp("any")


def refused(error: UserError, name: str) -> None:
    """Fail unless the error is one line that names the file and says what to do."""
    line = str(error)
    assert "\n" not in line
    assert line.startswith(f"{name}:"), line
    assert any(word in line for word in ("allowed: ", "next: ")), line
    assert len(line) < 1000


def read(make: Callable[[], Iterator[Any]], name: str) -> list[dict[str, Any]] | None:
    """The rows of a reader's tables, None where it refuses the file as it should."""
    try:
        return [row for table in make() for row in datasets.Dataset(table)]
    except UserError as error:
        refused(error, name)
        return None


def oracle(table: strategies.Table) -> list[dict[str, Any]] | None:
    """What Python's csv module reads of a csv whose separator is known; None where it is no table of text."""
    try:
        text = table.content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    found = list(csv.reader(io.StringIO(text, newline=""), delimiter=table.separator))
    rows = [row for row in found if row and not (len(found[0]) > 1 and len(row) == 1 and not row[0].strip())]
    if not rows or "\0" in text or len({len(row) for row in rows}) != 1:
        return None
    columns = rows.pop(0) if table.header else list(map(str, range(len(rows[0]))))
    return [dict(zip(columns, row, strict=True)) for row in rows]


@cases(400)
@given(table=strategies.tables())
def test_any_csv_is_read_as_pythons_own_reader_does_or_refused(place: Path, table: strategies.Table) -> None:
    path = place / "a.csv"
    path.write_bytes(table.content)
    found = read(lambda: tables.separated(path, "a.csv", header=table.header), "a.csv")
    if table.whole:
        names = table.columns if table.header else list(map(str, range(len(table.columns))))
        assert found == [dict(zip(names, row, strict=True)) for row in table.rows]
    if found is not None and (expected := oracle(table)) is not None:
        assert found == expected


@cases(60)
@given(
    rows=st.lists(
        st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6), min_size=2, max_size=4),
        min_size=1,
    )
)
def test_any_tsv_is_read_as_it_stands_quotation_marks_and_all(place: Path, rows: list[list[str]]) -> None:
    path = place / "a.tsv"
    width = len(rows[0])
    path.write_text("\n".join("\t".join(row) for row in [list("abcd")[:width], *rows]) + "\n", encoding="utf-8")
    found = read(lambda: tables.separated(path, "a.tsv"), "a.tsv")
    if all(len(row) == width for row in rows):
        assert found == [dict(zip("abcd", row, strict=False)) for row in rows]
    else:
        assert found is None


def plain(value: Any) -> Any:
    """A value of JSON as a table keeps it: a key without a value is as one that is not there, 1 is 1.0."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if one is not None and plain(one) != {}}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.12g}")  # the JSON type of `datasets` reads 15 digits
    return float(f"{value:.12g}") if isinstance(value, int) and not isinstance(value, bool) else value


@cases(400)
@given(document=strategies.documents())
def test_any_json_is_read_as_pythons_own_reader_does_or_refused(place: Path, document: tuple[str, bytes]) -> None:
    ending, content = document
    path = place / f"a{ending}"
    path.write_bytes(content)
    wanted = Everything()
    found = read(lambda: json_rows.tables(path, path.name, wanted), path.name)
    if found is None:
        return
    text = content.decode("utf-8-sig")
    try:
        whole = json.loads(text)
        expected = whole if isinstance(whole, list) and ending == ".json" else [whole]
    except json.JSONDecodeError:
        expected = [json.loads(line) for line in text.split("\n") if line.strip()]
    expected = [{"text": row} if isinstance(row, str) else row for row in expected]
    assert [plain(row) for row in found] == [plain(row) for row in expected]


class Everything:
    """Wants any column."""

    def __contains__(self, column: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 1


@cases(60)
@given(
    sentences=st.lists(
        st.lists(st.lists(st.text("abO-#é漢", min_size=1, max_size=4), min_size=2, max_size=3), min_size=1, max_size=4),
        max_size=4,
    ),
    separator=st.sampled_from([" ", "\t"]),
    blank=st.sampled_from(["\n", "\n\n", " \n"]),
)
def test_any_conll_file_is_read_word_for_word_or_refused(
    place: Path, sentences: list[list[list[str]]], separator: str, blank: str
) -> None:
    path = place / "a.conll"
    written = blank.join("".join(f"{separator.join(line)}\n" for line in sentence) for sentence in sentences)
    path.write_text(written, encoding="utf-8")
    roles = {"words": "tokens", "tags": "ner_tags"}
    found = read(lambda: tables.sentences(path, "a.conll", roles, roles), "a.conll")
    if len({len(line) for sentence in sentences for line in sentence}) <= 1:
        assert found == [
            {"tokens": [line[0] for line in sentence], "ner_tags": [line[-1] for line in sentence]}
            for sentence in sentences
        ]
    else:
        assert found is None


cells = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="="), max_size=8),
    st.integers(-(10**9), 10**9),
    st.booleans(),
    st.none(),
)


@cases(40)
@given(rows=st.lists(st.lists(cells, min_size=3, max_size=3), min_size=1, max_size=5))
def test_any_sheet_is_read_as_it_is_seen_empty_rows_left_out(place: Path, rows: list[list[Any]]) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for one in [["a", "b", "c"], *rows]:
        book.active.append(one)
    book.save(place / "a.xlsx")
    found = read(lambda: tables.sheet(place / "a.xlsx", "a.xlsx"), "a.xlsx")
    words = {None: "", True: "TRUE", False: "FALSE"}
    shown = [[str(one) if type(one) in (int, str) else words[one] for one in line] for line in rows]
    errors = openpyxl.cell.cell.ERROR_CODES
    if any(one in errors for row in shown for one in row):
        assert found is None
    else:
        assert found == [dict(zip("abc", row, strict=True)) for row in shown if any(row)]


def row(content: bytes, role: str) -> Rows:
    return Rows(datasets.Dataset.from_dict({role: [{"bytes": content, "path": "a"}]}), "a.parquet")


texts_of_paths = st.sampled_from(["", ".", "..", "~nobody/a.png", "a\0b", "/dev/null/a", "/", "x" * 5000, "none.png"])
MODES = {
    "PNG": "1 L LA P RGB RGBA I;16",
    "TIFF": "1 L RGB RGBA CMYK I;16 I F",
    "BMP": "1 L P RGB",
    "GIF": "L P",
    "JPEG": "L RGB CMYK",
}


@st.composite
def pictures(draw: st.DrawFn) -> tuple[Any, bytes, bool]:
    """An image as it was written, its bytes, and whether they are whole."""
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind].split()))
    width, height = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    noise = numpy.random.default_rng(draw(st.integers(0, 99)))
    if mode == "F":
        image = Image.fromarray(noise.random((height, width), dtype=numpy.float32))
    elif mode == "I":
        image = Image.fromarray(noise.integers(0, 65_536, (height, width), dtype=numpy.int32))
    else:
        size = len(Image.new(mode, (width, height)).tobytes())
        image = Image.frombytes(mode, (width, height), noise.integers(0, 256, size, dtype=numpy.uint8).tobytes())
        if mode == "P":
            image.putpalette(noise.integers(0, 256, 768, dtype=numpy.uint8).tobytes())
    out = io.BytesIO()
    image.save(out, kind)
    damage = draw(st.one_of(st.none(), strategies.DAMAGE))
    content = out.getvalue()
    if damage is not None and damage[0] != "coded":
        return image, strategies.damaged(content, damage), False
    return Image.open(io.BytesIO(content)), content, True


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")  # of what it then raises for
@cases(200)
@given(picture=pictures())
def test_any_image_comes_out_as_it_is_seen_or_refused(picture: tuple[Any, bytes, bool]) -> None:
    image, content, whole = picture
    try:
        found = images.opened(row(content, "image"), 0)
    except UserError as error:
        assert not whole
        refused(error, "a.parquet")
        return
    assert found.mode == "RGB"
    if whole:
        assert numpy.abs(numpy.asarray(found).astype(int) - seen(image)).max() <= 1


def seen(image: Any) -> Any:
    """The colours of an image on white by plain arithmetic, shape (height, width, 3)."""
    if image.mode in ("I;16", "I", "F"):
        grey = numpy.asarray(image).astype(float) / (1 if image.mode == "F" else 65_535) * 255
        return numpy.repeat(grey[..., None], 3, axis=2).astype(int)
    if image.mode in ("LA", "RGBA"):
        colours = numpy.asarray(image.convert("RGBA")).astype(float)
        share = colours[..., 3:] / 255
        return (colours[..., :3] * share + 255 * (1 - share)).astype(int)
    return numpy.asarray(image.convert("RGB")).astype(int)


@cases(60)
@given(said=st.one_of(texts_of_paths, st.text(min_size=1, max_size=400), st.none(), st.integers(0, 9)))
def test_any_path_that_is_no_file_is_refused(place: Path, said: Any) -> None:
    try:
        named = datasets.Dataset.from_dict({"image": [said]})
    except UnicodeEncodeError:  # half of a letter, which no reader lets into a table
        return
    with pytest.raises(UserError) as raised:
        images.refuse_missing(Rows(named, "a.csv", folder=place))
    line = str(raised.value)
    assert line.startswith("a.csv: row 1")
    assert "\n" not in line


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Any, int, bytes, bool]:
    """Sound as float samples, its rate, a wav that holds it, and whether that is whole."""
    rate = draw(st.sampled_from([1, 999, 8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 192_000, 300_000_000]))
    channels, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4]))
    count = draw(st.integers(0, 300))
    noise = numpy.random.default_rng(draw(st.integers(0, 99)))
    integers = noise.integers(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1), (count, channels))
    # wav keeps 8 bits without a sign (Microsoft 1991) and all else with one.
    raw = [int(one) + 128 if width == 1 else int(one) for one in integers.flatten()]
    frames = b"".join(one.to_bytes(width, "little", signed=width > 1) for one in raw)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    damage = draw(st.one_of(st.none(), strategies.DAMAGE))
    whole = damage is None or damage[0] == "coded"
    content = out.getvalue() if whole else strategies.damaged(out.getvalue(), damage)
    return integers / 2 ** (8 * width - 1), rate, content, whole


@cases(200)
@given(recording=recordings())
def test_any_sound_is_heard_as_it_was_written_or_refused(recording: tuple[Any, int, bytes, bool]) -> None:
    samples, rate, content, whole = recording
    rows = row(content, "audio")
    try:
        found = audio.read(rows, 0, RATE)
        assert audio.samples(rows, 0, RATE) == len(found)
    except UserError as error:
        assert not whole or not len(samples) or not audio.RATES[0] <= rate <= audio.RATES[1]
        refused(error, "a.parquet")
        return
    assert numpy.isfinite(found).all()
    if whole:
        assert len(found) == math.ceil(len(samples) * RATE / rate)
        if rate == RATE:
            assert numpy.allclose(found, samples.mean(axis=1), atol=1e-6)


@cases(60)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_any_sound_of_floats_is_finite_or_refused(values: list[float]) -> None:
    data = struct.pack(f"<{len(values)}f", *values)
    riff = struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, RATE, 4 * RATE, 4, 32)  # 3: IEEE floats
    head = riff + form + struct.pack("<4sI", b"data", len(data))
    try:
        found = audio.read(row(head + data, "audio"), 0, RATE)
    except UserError as error:
        assert not all(map(math.isfinite, values))
        refused(error, "a.parquet")
        return
    assert numpy.array_equal(found, numpy.float32(values))
