"""The pictures of a model's answers: what is drawn and written into them, and that odd names do not break them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy
import pytest
from inline_snapshot import snapshot
from matplotlib import image
from matplotlib.colors import to_rgba
from PIL import Image

from hf_mps.finetune.report import pictures

pytestmark = pytest.mark.usefixtures("rendered")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of every picture that is drawn."""
    found: list[Any] = []
    add = matplotlib.figure.Figure.add_subplot

    def added(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(add(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(matplotlib.figure.Figure, "add_subplot", added)
    return found


def rows_of(pairs: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [{"label": truth, "prediction": answer} for truth, answer in pairs]


def test_each_cell_counts_its_pair_in_the_order_of_the_classes(drawn: list[Any]) -> None:
    pairs = [("bad", "bad")] * 3 + [("bad", "good")] + [("good", "good")] * 2
    png = pictures.confusion(rows_of(pairs), ["bad", "good", "odd"])["confusion_matrix.png"]
    (axes,) = drawn
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "0", "2", "0", "0", "0", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bad", "good", "odd"]
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25, 0], [0, 1, 0], [0, 0, 0]]
    assert image.imread(io.BytesIO(png)).shape[2] == 4


def test_of_many_classes_those_with_the_most_mistakes_are_shown(drawn: list[Any]) -> None:
    names = [f"class {number}" for number in range(40)]
    pairs = [(name, name) for name in names] + [(names[number], names[number + 1]) for number in range(10, 33)]
    pictures.confusion(rows_of(pairs), names)
    (axes,) = drawn
    assert axes.get_title(loc="left") == snapshot(
        "Validation rows by class: the 24 of 40 classes with the most mistakes"
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == names[10:34]
    assert not axes.texts  # the cells are too small for numbers


def test_names_with_dollars_and_of_any_length_are_drawn(drawn: list[Any]) -> None:
    names = ["$5 or $6", "a" * 200, "ünïcode 名"]
    assert pictures.confusion(rows_of([(names[0], names[1])]), names)["confusion_matrix.png"].startswith(b"\x89PNG")
    labels = drawn[0].get_yticklabels()
    assert [len(label.get_text()) for label in labels] == [8, 24, 9]
    assert not any(label.get_parse_math() for label in labels)


def test_long_names_that_begin_alike_stay_apart(drawn: list[Any]) -> None:
    names = [f"many questions about the {what}" for what in ("bill", "delivery")]
    pictures.confusion(rows_of([(names[0], names[1])]), names)
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == snapshot(
        ["many questio…ut the bill", "many questio…he delivery"]
    )


def test_values_lie_over_their_truths(drawn: list[Any]) -> None:
    png = pictures.scatter(rows_of([(0.0, 0.5), (1.0, 1.5), (5.0, 4.0)]))["values.png"]
    assert png.startswith(b"\x89PNG")
    assert drawn[0].collections[0].get_offsets().tolist() == [[0.0, 0.5], [1.0, 1.5], [5.0, 4.0]]


def test_a_few_rows_at_equal_distances_are_shown() -> None:
    assert [pictures.spread(count) for count in (0, 1, 4, 5, 16)] == [[], [0], [0, 1, 2, 3], [0, 2, 4], [0, 4, 8, 12]]


def test_true_boxes_are_drawn_above_the_predicted_ones_in_the_colours_of_their_classes(drawn: list[Any]) -> None:
    scene = Image.new("RGB", (48, 40))
    png = pictures.boxes([(scene, [("$cat", "", 1, 2, 10, 20)], [("dog", "0.90", 3, 4, 2, 2)])])["boxes.png"]
    assert png.startswith(b"\x89PNG")
    places = [[patch.get_bbox().extents.tolist() for patch in axes.patches] for axes in drawn]
    assert places == [[[1, 2, 11, 22]], [[3, 4, 5, 6]]]
    colours = [axes.patches[0].get_edgecolor() for axes in drawn]
    legend = drawn[0].figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["$cat", "dog"]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == colours
    assert [axes.texts[0].get_text() for axes in drawn] == ["", "0.90"]
    assert [tuple(axes.images[0].get_extent()) for axes in drawn] == [(0, 48, 40, 0)] * 2


@pytest.mark.parametrize("name", ["a long name of a class, with number", "名" * 40, "a"])
@pytest.mark.usefixtures("rendered")
def test_the_legend_of_many_classes_is_on_the_page(drawn: list[Any], name: str) -> None:
    scene = Image.new("RGB", (48, 40))
    pictures.boxes([(scene, [(f"{name} {number}", "", 1, 2, 10, 20) for number in range(40)], [])] * 2)
    figure = drawn[0].figure
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= 0
    assert drawn[0].get_window_extent().height > 0.1 * figure.bbox.height


@pytest.mark.parametrize("classes_named", [3, 40])
def test_masks_lie_over_their_images_and_what_is_no_class_is_clear(drawn: list[Any], classes_named: int) -> None:
    names = [f"class {number}" for number in range(classes_named)]
    truth = numpy.array([[0, 1], [255, 2]])
    answer = numpy.arange(classes_named).reshape(1, -1)[:, :40]
    pictures.masks([(Image.new("RGB", (2, 2)), truth, answer)], names)
    legend = drawn[0].figure.legends[0]
    shown = drawn[0].images[0].get_array()
    assert [text.get_text() for text in legend.get_texts()] == names
    assert shown[1, 0, 3] == 0
    for number, place in enumerate(((0, 0), (0, 1), (1, 1))):
        assert shown[place].tolist() == list(to_rgba(legend.get_patches()[number].get_facecolor(), 0.6))
    assert len({patch.get_facecolor() for patch in legend.get_patches()}) == classes_named
