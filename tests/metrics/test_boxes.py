"""COCO's average precision: cases worked out by hand, and random boxes against what pycocotools says of them."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from hf_mps.metrics import boxes
from hf_mps.metrics.table import REPORTS

IMAGES, CLASSES = 12, 3
# pycocotools 2.0.11 (stats 0, 1, 2 and 8) of the boxes of `drawn` with these seeds.
PYCOCOTOOLS: dict[int, tuple[float, ...]] = {
    0: (0.136681637510, 0.322275414355, 0.085528552855, 0.285780885781),
    1: (0.265785606067, 0.529629519343, 0.241928252976, 0.494318181818),
    2: (0.282703842729, 0.522664381823, 0.219701136780, 0.399368686869),
    3: (0.189614104268, 0.376661951909, 0.174964639321, 0.347777777778),
}


def drawn(seed: int) -> tuple[list[Any], list[Any]]:
    """Predictions and references: shifted copies of the boxes that there are, some of another class, and others."""
    draw = numpy.random.default_rng(seed)
    predictions, references = [], []
    for _ in range(IMAGES):
        count = int(draw.integers(0, 5))
        corner, size = draw.uniform(0, 60, (count, 2)), draw.uniform(20, 40, (count, 2))
        truth = numpy.concatenate([draw.integers(0, CLASSES, (count, 1)), corner, corner + size], axis=1)
        found = [numpy.zeros((0, 6))]
        for label, *box in truth:
            for _ in range(int(draw.integers(0, 4))):
                kind = label if draw.random() < 0.8 else draw.integers(0, CLASSES)
                found.append(numpy.array([[kind, draw.random(), *(numpy.array(box) + draw.normal(0, 3, 4))]]))
        for _ in range(int(draw.integers(0, 4))):
            place = draw.uniform(0, 60, 2)
            found.append(numpy.array([[draw.integers(0, CLASSES), draw.random(), *place, *(place + 25)]]))
        predictions.append(numpy.concatenate(found))
        references.append(truth)
    return predictions, references


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes_have_the_scores_that_pycocotools_gives_them(seed: int) -> None:
    ours = boxes.average_precision(*drawn(seed))
    assert tuple(ours) == REPORTS["map"]
    assert tuple(ours.values()) == pytest.approx(PYCOCOTOOLS[seed], abs=1e-9)


def test_a_box_found_exactly_is_all_and_a_second_one_of_a_lower_score_costs_nothing() -> None:
    truth = numpy.array([[0, 10, 10, 30, 30]])
    found = numpy.array([[0, 0.9, 10, 10, 30, 30], [0, 0.5, 10, 10, 30, 30]])
    assert boxes.average_precision([found], [truth]) == dict.fromkeys(REPORTS["map"], 1.0)
    # A wrong box of a higher score halves the precision at every recall.
    wrong = numpy.array([[0, 0.95, 60, 60, 80, 80], [0, 0.9, 10, 10, 30, 30]])
    assert boxes.average_precision([wrong], [truth])["map"] == pytest.approx(0.5)


def test_overlap_decides_at_each_threshold() -> None:
    truth, found = numpy.array([[0, 0, 0, 10, 10]]), numpy.array([[0, 0.9, 0, 0, 10, 7.2]])  # 0.72 of the area
    assert boxes.overlaps(found[:, 2:], truth[:, 1:])[0, 0] == pytest.approx(0.72)
    scores = boxes.average_precision([found], [truth])
    assert scores == pytest.approx({"map": 0.5, "map_50": 1.0, "map_75": 0.0, "mar_100": 0.5})


def test_a_class_never_found_counts_and_one_that_is_not_there_does_not() -> None:
    truth = numpy.array([[0, 0, 0, 10, 10], [1, 20, 20, 30, 30]])
    found = numpy.array([[0, 0.9, 0, 0, 10, 10], [2, 0.9, 50, 50, 60, 60]])
    assert boxes.average_precision([found], [truth])["map"] == pytest.approx(0.5)
    nothing = [numpy.zeros((0, 6))], [numpy.zeros((0, 5))]
    assert boxes.average_precision(*nothing) == dict.fromkeys(REPORTS["map"], 0.0)
