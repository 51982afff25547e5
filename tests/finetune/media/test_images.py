"""Images of every mode come out as a person sees them, in RGB of 8 bits, or are refused by the row."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
from inline_snapshot import snapshot
from PIL import Image

from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import images
from tests.refusals import refusal


def opened(image: Any, kind: str = "PNG", **settings: Any) -> Any:
    """The pixels that a run sees of an image once it was written, shape (height, width, 3)."""
    content = io.BytesIO()
    image.save(content, kind, **settings)
    return pixels(content.getvalue())


def pixels(content: bytes) -> Any:
    rows = Rows(datasets.Dataset.from_dict({"image": [{"bytes": content, "path": "a.png"}]}), "a.parquet")
    found = images.opened(rows, 0)
    assert found.mode == "RGB"
    return numpy.asarray(found)


def grey(value: float, kind: Any, mode: str | None = None) -> Any:
    made = Image.fromarray(numpy.full((4, 4), value, dtype=kind))
    assert mode is None or made.mode == mode
    return made


@pytest.mark.parametrize(("dark", "light"), [(8_000, 40_000), (300, 65_535), (20_000, 24_000)])
def test_two_classes_of_16_bit_grey_can_be_told_apart(dark: int, light: int) -> None:
    seen = [opened(grey(value, numpy.uint16, "I;16")) for value in (dark, light)]
    assert [int(one[0, 0, 0]) for one in seen] == [round(dark / 257), round(light / 257)]
    assert [len(numpy.unique(one)) for one in seen] == [1, 1]


@pytest.mark.parametrize(
    ("image", "kind", "value"),
    [
        (grey(32_768, numpy.int32, "I"), "TIFF", 128),
        (grey(0.5, numpy.float32, "F"), "TIFF", 128),
        (grey(1.0, numpy.float32), "TIFF", 255),
        (Image.frombytes("I;16B", (1, 1), b"\x80\x00"), "TIFF", 128),
        (grey(200, numpy.uint8, "L"), "PNG", 200),
        (Image.new("1", (2, 2), 1), "PNG", 255),
        (Image.new("CMYK", (2, 2), (0, 0, 0, 255)), "TIFF", 0),
    ],
    ids=["I", "F half", "F white", "I;16B", "L", "1", "CMYK"],
)
def test_every_mode_is_scaled_from_its_own_white(image: Any, kind: str, value: int) -> None:
    assert set(opened(image, kind).flatten()) == {value}


def test_what_is_transparent_stands_on_white_whatever_colour_it_hides() -> None:
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert [set(opened(image).flatten()) for image in (Image.new("RGBA", (2, 2), (0, 0, 0, 0)), half)] == [{255}, {127}]
    assert set(opened(Image.new("LA", (2, 2), (0, 0))).flatten()) == {255}
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 200, 10, 10])
    palette.putpixel((1, 0), 1)
    assert opened(palette, transparency=0).tolist() == [[[255, 255, 255], [200, 10, 10]]]
    assert opened(palette).tolist() == [[[0, 0, 0], [200, 10, 10]]]
    assert set(opened(Image.new("RGBA", (2, 2), (9, 9, 9, 255))).flatten()) == {9}


@pytest.mark.parametrize(
    ("image", "line"),
    [
        (grey(1e5, numpy.float32), "its values go from 100000 to 100000; allowed: 0 to 1 in mode F"),
        (grey(-3, numpy.int32), "its values go from -3 to -3; allowed: 0 to 65535 in mode I"),
        (grey(float("nan"), numpy.float32), "its values go from nan to nan; allowed: 0 to 1 in mode F"),
    ],
)
def test_numbers_that_are_no_brightness_are_refused(image: Any, line: str) -> None:
    assert (
        refusal(opened, image, "TIFF")
        == f"a.parquet: row 1: image a.png cannot be decoded: {line}; next: save it again, or leave it out"
    )


def test_an_image_of_more_pixels_than_pillow_opens_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)  # the error comes at twice as many
    Image.new("L", (20, 20)).save(tmp_path / "big.png")
    rows = Rows(datasets.Dataset.from_dict({"image": ["big.png"]}), "train.csv", folder=tmp_path)
    assert refusal(images.refuse_missing, rows) == snapshot(
        "train.csv: row 1: image big.png has more than the 0 million pixels that Pillow opens; next: save it smaller"
    )


def test_an_image_that_is_cut_off_is_refused() -> None:
    content = io.BytesIO()
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)).save(content, "PNG")
    with pytest.raises(UserError, match=r"^a.parquet: row 1: image a.png cannot be decoded: "):
        pixels(content.getvalue()[:2000])
