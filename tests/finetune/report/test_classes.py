"""The pictures of a classifier's answers: what is written into them, and that odd names do not break them."""

from __future__ import annotations

import io
from typing import Any

import matplotlib.figure
import pytest
from inline_snapshot import snapshot
from matplotlib import image

from hf_mps.finetune.report import classes

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


def test_each_cell_counts_its_pair_in_the_order_of_the_classes(drawn: list[Any]) -> None:
    pairs = [("bad", "bad")] * 3 + [("bad", "good")] + [("good", "good")] * 2
    png = classes.confusion(pairs, ["bad", "good", "odd"])["confusion_matrix.png"]
    (axes,) = drawn
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "0", "2", "0", "0", "0", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bad", "good", "odd"]
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25, 0], [0, 1, 0], [0, 0, 0]]
    assert image.imread(io.BytesIO(png)).shape[2] == 4


def test_of_many_classes_those_with_the_most_mistakes_are_shown(drawn: list[Any]) -> None:
    names = [f"class {number}" for number in range(40)]
    pairs = [(name, name) for name in names] + [(names[number], names[number + 1]) for number in range(10, 33)]
    classes.confusion(pairs, names)
    (axes,) = drawn
    assert axes.get_title(loc="left") == snapshot(
        "Validation rows by class: the 24 of 40 classes with the most mistakes"
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == names[10:34]
    assert not axes.texts  # the cells are too small for numbers


def test_names_with_dollars_and_of_any_length_are_drawn(drawn: list[Any]) -> None:
    names = ["$5 or $6", "a" * 200, "ünïcode 名"]
    assert classes.confusion([(names[0], names[1])], names)["confusion_matrix.png"].startswith(b"\x89PNG")
    assert [len(label.get_text()) for label in drawn[0].get_yticklabels()] == [10, 24, 9]


def test_values_lie_over_their_truths(drawn: list[Any]) -> None:
    png = classes.scatter([0.0, 1.0, 5.0], [0.5, 1.5, 4.0])["values.png"]
    assert png.startswith(b"\x89PNG")
    assert drawn[0].collections[0].get_offsets().tolist() == [[0.0, 0.5], [1.0, 1.5], [5.0, 4.0]]
