"""Segmentation: how well the areas of each class overlap, over all images together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# The background that reduce_labels takes out of the classes, in 8-bit maps.
_BACKGROUND = 255


def mean_iou(
    predictions: Sequence[Any],
    references: Sequence[Any],
    num_labels: int,
    ignore_index: int,
    nan_to_num: float | None = None,
    label_map: Mapping[int, int] | None = None,
    reduce_labels: bool = False,
) -> dict[str, Any]:
    """Intersection over union: `mean_iou`, `mean_accuracy`, `overall_accuracy`, and both per category, as arrays.

    Maps of classes of shape (height, width), each pair in its own size. Pixels whose reference is `ignore_index` do not
    count; `label_map` renames classes of the references; `reduce_labels` makes 0 the background and counts the others
    from 0. A class that no map holds is NaN, which the means leave out, or `nan_to_num`.
    """
    import numpy

    total = numpy.zeros((3, num_labels))
    for prediction, reference in zip(predictions, references, strict=True):
        truth = numpy.asarray(reference)
        if label_map:
            renamed = truth.copy()
            for old, new in label_map.items():
                renamed[truth == old] = new
            truth = renamed
        if reduce_labels:
            # In the type of a Python int: 0 - 1 would wrap around in an 8-bit map.
            truth = numpy.where((truth == 0) | (truth == _BACKGROUND), _BACKGROUND, truth.astype(int) - 1)
        total += areas(numpy.asarray(prediction), truth, num_labels, ignore_index)
    scores = overlaps(total)
    if nan_to_num is None:
        return scores
    return {name: numpy.nan_to_num(value, nan=nan_to_num) for name, value in scores.items()}


def areas(answer: Any, truth: Any, num_labels: int, ignore_index: int) -> Any:
    """Return the pixels of each class that are right, that were answered and that there are, of shape (3, classes).

    `answer` and `truth` are maps of classes of one shape; pixels whose truth is `ignore_index` do not count.
    """
    import numpy

    counted = truth != ignore_index
    answer, truth = answer[counted], truth[counted]
    found = [area[(area >= 0) & (area < num_labels)] for area in (answer[answer == truth], answer, truth)]
    return numpy.stack([numpy.bincount(area.astype(int), minlength=num_labels) for area in found])


def overlaps(total: Any) -> dict[str, Any]:
    """Return `mean_iou`'s scores of `areas` summed over images. A class that no map holds is NaN, left out of means."""
    import numpy

    shared, answered, present = numpy.asarray(total, dtype=numpy.float64)
    if not (answered + present).any():  # no pixel counts: every score is NaN
        nothing = numpy.full(len(shared), numpy.nan)
        means = dict.fromkeys(("mean_iou", "mean_accuracy", "overall_accuracy"), numpy.nan)
        return {**means, "per_category_iou": nothing, "per_category_accuracy": nothing}
    with numpy.errstate(divide="ignore", invalid="ignore"):
        overlap, accuracy = shared / (answered + present - shared), shared / present
        return {
            "mean_iou": numpy.nanmean(overlap),
            "mean_accuracy": numpy.nanmean(accuracy),
            "overall_accuracy": shared.sum() / present.sum(),
            "per_category_iou": overlap,
            "per_category_accuracy": accuracy,
        }
