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

    Maps of classes of shape (height, width), each pair of its own size. Pixels whose reference is `ignore_index` do not
    count; `label_map` renames classes of the references; `reduce_labels` makes 0 the background and counts the others
    from 0. A class that no map holds is NaN, which the means leave out, or `nan_to_num`.
    """
    import numpy

    shared, answered, present = (numpy.zeros(num_labels) for _ in range(3))
    for prediction, reference in zip(predictions, references, strict=True):
        answer, truth = numpy.asarray(prediction), _relabelled(numpy.asarray(reference), label_map, reduce_labels)
        counted = truth != ignore_index
        answer, truth = answer[counted], truth[counted]
        for total, area in ((shared, answer[answer == truth]), (answered, answer), (present, truth)):
            total += numpy.bincount(area[(area >= 0) & (area < num_labels)].astype(int), minlength=num_labels)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        overlap, accuracy = shared / (answered + present - shared), shared / present
        scores = {
            "mean_iou": numpy.nanmean(overlap),
            "mean_accuracy": numpy.nanmean(accuracy),
            "overall_accuracy": shared.sum() / present.sum(),
            "per_category_iou": overlap,
            "per_category_accuracy": accuracy,
        }
    if nan_to_num is None:
        return scores
    return {name: numpy.nan_to_num(value, nan=nan_to_num) for name, value in scores.items()}


def _relabelled(truth: Any, label_map: Mapping[int, int] | None, reduce_labels: bool) -> Any:
    import numpy

    renamed = truth
    if label_map:
        renamed = truth.copy()
        for old, new in label_map.items():
            renamed[truth == old] = new
    if reduce_labels:
        # In the type of a Python int: 0 - 1 would wrap around in an 8-bit map.
        background = (renamed == 0) | (renamed == _BACKGROUND)
        renamed = numpy.where(background, _BACKGROUND, renamed.astype(int) - 1)
    return renamed
