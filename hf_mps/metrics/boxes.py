"""Detection: COCO's average precision and recall of boxes, over all images together.

The definition is that of pycocotools' COCOeval (github.com/cocodataset/cocoapi), without its areas and crowds. Neither
it nor torchmetrics, which needs it and torchvision, is asked for: that is two compiled packages for one formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from hf_mps.metrics.table import REPORTS

THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
"""Overlaps (intersection over union) from which on a box counts as found."""
RECALLS = 101
"""Recalls from 0 to 1 at which precision is read."""
MOST = 100
"""Boxes of an image and a class that count, those of the highest score."""


def average_precision(predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Return what the metric `map` reports: precision averaged over recalls, classes and THRESHOLDS, at 0.5 and 0.75
    alone, and the recall.

    Each image has in `predictions` an array (n, 6) of label, score and box, in `references` one (m, 5) of label and
    box; a box is left, upper, right, lower in any unit. 0 where there is nothing to find.
    """
    classes = sorted({int(label) for truth in references for label in truth[:, 0]})
    precision = numpy.zeros((len(classes), len(THRESHOLDS)))
    recall = numpy.zeros_like(precision)
    for place, label in enumerate(classes):
        found = [one[one[:, 0] == label] for one in predictions]
        # The MOST boxes of an image with the highest scores, in that order. Mergesort is stable, as in COCOeval: the
        # first of equals stays first.
        found = [one[numpy.argsort(-one[:, 1], kind="mergesort")[:MOST]] for one in found]
        wanted = [truth[truth[:, 0] == label][:, 1:] for truth in references]
        hits = [_hits(one[:, 2:], truth) for one, truth in zip(found, wanted, strict=True)]
        order = numpy.argsort(-numpy.concatenate([one[:, 1] for one in found]), kind="mergesort")
        precision[place], recall[place] = _curve(numpy.concatenate(hits, axis=1)[:, order], sum(map(len, wanted)))
    if not classes:
        return dict.fromkeys(REPORTS["map"], 0.0)
    at = {f"map_{round(100 * one)}": precision[:, THRESHOLDS.index(one)].mean() for one in (0.5, 0.75)}
    scores = {"map": precision.mean(), **at, "mar_100": recall.mean()}
    return {name: float(value) for name, value in scores.items()}


def overlaps(some: Any, others: Any) -> Any:
    """Return the intersection over union of boxes (n, 4) and (m, 4), of shape (n, m)."""
    upper_left = numpy.maximum(some[:, None, :2], others[None, :, :2])
    lower_right = numpy.minimum(some[:, None, 2:], others[None, :, 2:])
    shared = numpy.clip(lower_right - upper_left, 0, None).prod(axis=2)
    areas = [numpy.clip(one[:, 2:] - one[:, :2], 0, None).prod(axis=1) for one in (some, others)]
    return shared / numpy.maximum(areas[0][:, None] + areas[1][None] - shared, numpy.finfo(numpy.float64).tiny)


def _hits(found: Any, wanted: Any) -> Any:
    """Return which boxes are right at each threshold, (thresholds, n): each takes the best one that is left."""
    right = numpy.zeros((len(THRESHOLDS), len(found)), dtype=bool)
    if not len(found) or not len(wanted):
        return right
    shared = overlaps(numpy.asarray(found, numpy.float64), numpy.asarray(wanted, numpy.float64))
    for level, threshold in enumerate(THRESHOLDS):
        left = numpy.ones(len(wanted), dtype=bool)
        for place, row in enumerate(shared):
            # The last of equals, as pycocotools goes through them.
            candidates = numpy.where(left, row, -1.0)
            best = len(candidates) - 1 - int(candidates[::-1].argmax())
            if candidates[best] >= threshold - 1e-10:
                right[level, place], left[best] = True, False
    return right


def _curve(right: Any, wanted: int) -> tuple[Any, Any]:
    """Return the mean precision over RECALLS and the last recall at each threshold, for boxes in order of score."""
    precisions, recalls = numpy.zeros(len(right)), numpy.zeros(len(right))
    for level, hits in enumerate(right):
        if not len(hits):
            continue
        true = hits.cumsum()
        recall, precision = true / wanted, true / numpy.arange(1, len(hits) + 1)
        falling = numpy.maximum.accumulate(precision[::-1])[::-1]
        places = numpy.searchsorted(recall, numpy.linspace(0, 1, RECALLS), side="left")
        precisions[level] = numpy.append(falling, 0.0)[numpy.minimum(places, len(falling))].mean()
        recalls[level] = recall[-1]
    return precisions, recalls
