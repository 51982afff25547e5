"""Images with boxes around objects: rows of the usual shapes, prepared by transformers' own image processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images

Format = Literal["xywh", "xyxy"]
# What data sets call an object's box and its class.
BOX, CLASS = ("bbox", "bboxes", "box", "boxes"), ("category", "category_id", "categories", "label", "labels", "class")
Object = tuple[list[float], int]
"""A box as (left, upper, width, height) in pixels, and the number of its class."""


def class_names(rows: Rows) -> list[str] | None:
    """Return the classes that the data set itself names for its objects; None where it names none."""

    def names(feature: Any) -> list[str] | None:
        if getattr(feature, "names", None):
            return list(feature.names)
        inside = feature.values() if isinstance(feature, Mapping) else [getattr(feature, "feature", None)]
        return next((found for one in inside if one is not None and (found := names(one))), None)

    return names(rows.dataset.features["objects"])


def objects(rows: Rows, index: int, raw: Any, names: Sequence[str], form: Format) -> list[Object]:
    """Return the objects of one row, whose column holds `raw`: a list of dicts, or a dict of lists as datasets has it.

    Classes are numbers from 0 on, or names. Raises UserError, naming the row, for what is no box and an unknown class.
    """
    place = rows.place(index)
    found = []
    if isinstance(raw, Mapping):
        pairs = list(zip(*(raw[_one_of(raw, keys, place)] for keys in (BOX, CLASS)), strict=True))
    elif not isinstance(raw, Sequence) or isinstance(raw, str):
        raise UserError(f"{place} has no objects; allowed: a list of {{bbox, category}}, empty where there are none")
    else:
        pairs = [(one[_one_of(one, BOX, place)], one[_one_of(one, CLASS, place)]) for one in raw]
    for box, kind in pairs:
        if not isinstance(box, Sequence) or len(box) != 4 or not all(isinstance(one, (int, float)) for one in box):
            raise UserError(f"{place} has a box {brief(str(box))}; allowed: four numbers, {form} in pixels")
        number = names.index(kind) if kind in names else kind
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(names):
            near = nearest(str(kind), names)
            raise UserError(f"{place} has an object of class {kind!r}; allowed: 0 to {len(names) - 1}, or a name{near}")
        left, upper, third, fourth = map(float, box)
        size = [third, fourth] if form == "xywh" else [third - left, fourth - upper]
        found.append(([left, upper, *size], number))
    return found


class Boxes(images.Varied):
    """A split for Trainer: rows of `pixel_values`, float32 of shape (3, H, W), and `labels`, as the model's loss has
    them: {"class_labels": (n,), "boxes": (n, 4)}, centre and size as shares of the image's.

    `found` are the objects of each row; None where the rows have none to learn from. A row of a training split is
    mirrored with probability `flip`.
    """

    def __init__(
        self, rows: Rows, processor: Any, found: Sequence[Sequence[Object]] | None, *, flip: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(rows, seed)
        self._processor, self._found, self._flip = processor, found, flip

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        image = images.opened(self._rows, index)
        if self._found is None:
            return {"pixel_values": self._processor(images=[image], return_tensors="pt")["pixel_values"][0]}
        found = self._found[index]
        if self._flip and self.draw(index).random() < self._flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            found = [([image.width - box[0] - box[2], *box[1:]], kind) for box, kind in found]
        annotations = [{"bbox": box, "category_id": kind, "area": box[2] * box[3], "iscrowd": 0} for box, kind in found]
        target = {"image_id": index, "annotations": annotations}
        made = self._processor(images=[image], annotations=[target], return_tensors="pt")
        labels = made["labels"][0]
        truths = {"class_labels": labels["class_labels"], "boxes": labels["boxes"].float()}
        return {"pixel_values": made["pixel_values"][0], "labels": truths}


def collate(rows: list[Any]) -> dict[str, Any]:
    """Return a batch: pixels stacked, each row's labels as they are, for rows differ in their number of objects."""
    import torch

    batch: dict[str, Any] = {"pixel_values": torch.stack([row["pixel_values"] for row in rows])}
    return batch if "labels" not in rows[0] else {**batch, "labels": [row["labels"] for row in rows]}


def square(processor: Any, side: int) -> Any:
    """Let an image processor make squares of `side` pixels of every image, as RT-DETR reads them: one shape, in which
    boxes as shares of the image are right without knowing how it was padded.
    """
    size = {"height": side, "width": side}
    processor.size = type(processor.size)(**size) if not isinstance(processor.size, dict) else size
    processor.do_pad = False
    return processor


def _one_of(raw: Any, keys: Sequence[str], place: str) -> str:
    found = next((key for key in keys if isinstance(raw, Mapping) and key in raw), None)
    if found is None:
        there = ", ".join(raw) if isinstance(raw, Mapping) else type(raw).__name__
        raise UserError(f"{place} has an object without {keys[0]} ({there}); allowed: {', '.join(keys)}")
    return found
