"""Object detection: boxes around the objects of an image and their classes, learned as DETR and its kin do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from PIL import Image, ImageDraw
from pydantic import Field

from hf_mps import metrics
from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Prepared
from hf_mps.finetune.tasks.image_classification import ImageTask
from hf_mps.metrics.boxes import average_precision

Format = Literal["xywh", "xyxy"]
# What data sets call an object's box and its class.
BOX, CLASS = ("bbox", "bboxes", "box", "boxes"), ("category", "category_id", "categories", "label", "labels", "class")
Object = tuple[list[float], int]
"""A box as (left, upper, width, height) in pixels, and the number of its class."""
Objects = Sequence[Sequence[Object]]
"""Those of each row."""


# Width and height in pixels of the images of a smoke run.
SMOKE_SIZE = (48, 40)


class Columns(schema.Columns):
    """The columns of the data by their roles: images, and the objects in each, with `bbox` and `category` of each."""

    image: str = "image"
    """The column of the image: a path, or bytes."""
    objects: str = "objects"
    """The column of boxes with their classes."""


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the class names in the order of their numbers."""

    LEAST = 1  # a box holds it, or nothing

    columns: Columns = Columns()


class Recipe(labels.Overridden):
    """Adds how boxes are written, and predictions.

    Images become squares; boxes are in pixels, `xywh` as COCO's. predictions.csv has those of at least `threshold`.
    """

    data: Data
    image_size: int = Field(default=512, ge=32)
    """The longest side of an image in pixels."""
    box_format: Format = "xywh"
    """A box's numbers: left, upper and width, height (xywh) or right, lower (xyxy)."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """The probability of mirroring a training image."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """The least probability of an answer."""


class ObjectDetection(ImageTask[Recipe]):
    """Learns the boxes around objects, and their classes."""

    metrics = ("map",)
    truth = ("objects",)
    at_a_time = 64
    architectures = ("ForObjectDetection",)
    family = ("yolos", "image and boxes")
    shows = "pictures"

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        from hf_mps.finetune.models.detection_trainer import unfilled

        recipe = self.recipe
        chosen = self.measures()
        names, told = recipe.data.labels, "data.labels in the recipe"
        if not names:
            names, told = _class_names(rows["train"].dataset.features["objects"]), labels.NAMED
        if not names:
            way_on = "next: data.labels=[cat, dog, …], in the order of their numbers"
            raise UserError(f"data.labels names no classes; {way_on}")
        for split in rows.values():
            images.refuse_missing(split)
        found = {split: _objects(one, names, recipe.box_format) for split, one in rows.items()}
        self.begin(names)
        processor = self.processing_class
        # Squares, as RT-DETR reads them: boxes as shares of the image are right without knowing how it was padded.
        images.resize(processor, {"height": recipe.image_size, "width": recipe.image_size})
        processor.do_pad = False
        self.load(labels.configure(self.checkpoint.config(), names, recipe.config_overrides))
        count, without = sum(map(len, found["train"])), sum(not one for one in found["train"])
        varied = f"mirrored in {recipe.flip:.0%}, drawn from the seed, the epoch and the row alone"
        varied, empty = varied if recipe.flip else "not varied", f"; {without} images have none" if without else ""
        splits = {split: Boxes(one, processor, found[split], recipe.seed) for split, one in rows.items()}
        splits["train"].flip = recipe.flip
        return self.trained(
            rows,
            splits,
            metrics=chosen,
            compute_metrics=lambda evaluated: chosen.of(
                average_precision(unfilled(evaluated.predictions), unfilled(evaluated.label_ids))
            ),
            baseline=metrics.Baseline("finds nothing", dict.fromkeys(chosen.reported, 0.0)),
            choices={
                "images": images.prepared_by(processor, "one shape"),
                "objects": Choice(f"{count} in {len(found['train'])} training images", f"images are {varied}{empty}"),
                "labels": Choice(f"{len(names)} classes: {labels.listed(names)}", told),
            },
            figures=lambda predicted: self._figures(rows["validation"], found["validation"], predicted),
        )

    def _figures(self, rows: Rows, truths: Objects, predicted: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        scenes = []
        for at in pictures.spread(len(predicted)):
            found = []
            for one in predicted[at]["prediction"]:
                left, upper, right, lower = one["box"].values()
                found.append((one["label"], f"{one['score']:.2f}", left, upper, right - left, lower - upper))
            scenes.append((images.opened(rows, at), [(self.names[kind], "", *box) for box, kind in truths[at]], found))
        return pictures.boxes(scenes)

    def begin(self, names: Sequence[str]) -> None:
        from hf_mps.finetune.models.detection_trainer import DetectionTrainer

        super().begin(names)
        self.trainer, self.collator = DetectionTrainer, collate

    def inputs(self, rows: Rows) -> Boxes:
        images.refuse_missing(rows)
        return Boxes(rows, self.processing_class, None)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each image's boxes, the best first, as transformers' pipeline has them."""
        for at, best in enumerate(trainer.predict(inputs).predictions):
            image = rows.dataset[at]["image"]
            size = 2 * images.dimensions(rows, at, image)
            told = []
            for label, score, *box in best.tolist():
                if label >= 0 and score >= self.recipe.threshold:
                    corners = (round(min(max(one, 0.0), 1.0) * side) for one, side in zip(box, size, strict=True))
                    place = dict(zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
                    told.append({"label": self.names[int(label)], "score": round(score, 4), "box": place})
            yield {"row": rows.number(at), "image": images.named(image), "prediction": told}

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Write an image of one or two rectangles, each in its class's colour, and return their boxes."""
        draw, names, image = made.draw, recipe.data.labels, Image.new("RGB", SMOKE_SIZE, (30, 30, 30))
        kinds, found = range(min(len(synthetic.PAINTS), len(names or synthetic.PAINTS))), []
        for _ in range(draw.choice((1, 2))):
            left, upper, kind = draw.randrange(28), draw.randrange(22), draw.choice(kinds)
            ImageDraw.Draw(image).rectangle((left, upper, left + 15, upper + 13), synthetic.PAINTS[kind])
            box = [left, upper, 16, 14] if recipe.box_format == "xywh" else [left, upper, left + 16, upper + 14]
            found.append({"bbox": box, "category": synthetic.class_value(names, kind)})
        return {"image": made.save(image), "objects": found}


def _objects(rows: Rows, names: Sequence[str], form: Format) -> list[list[Object]]:
    """Return the objects of every row but those of no area, of which a person is told.

    Raises UserError for what is no object, and for a split without any.
    """
    every = [objects(rows, index, raw, names, form) for index, raw in enumerate(rows.dataset["objects"])]
    # transformers leaves them out without a word (prepare_coco_detection_annotation).
    found = [[one for one in row if min(one[0][2:]) > 0] for row in every]
    if found != every:
        first = next(at for at, row in enumerate(every) if row != found[at])
        name = brief(images.named(rows.dataset[first]["image"]))
        count, kept = (sum(map(len, each)) for each in (every, found))
        told = f"{count - kept} of {count} boxes have no area and are left out, the first at {rows.place(first)}"
        notices.warn_user(told + (name and f" ({name})"))
    if not any(found):
        raise UserError(f"{rows.where}: no row has an object; allowed: one in some rows at least")
    if max(number for row in found for box, _ in row for number in box) <= 1:
        box = next(row[0][0] for row in found if row)
        told = f"{rows.where}: no box has a number above 1, such as {brief(str(box))}: they are shares of the image"
        raise UserError(f"{told}; allowed: boxes in pixels")
    return found


def _class_names(feature: Any) -> list[str]:
    """Return the classes that the data set itself names inside a column's type; none where it names none."""
    if getattr(feature, "names", None):
        return list(feature.names)
    inside = feature.values() if isinstance(feature, Mapping) else [getattr(feature, "feature", None)]
    return next((found for one in inside if one is not None and (found := _class_names(one))), [])


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
        numbers = isinstance(box, Sequence) and len(box) == 4 and all(isinstance(one, (int, float)) for one in box)
        if not numbers or not all(map(math.isfinite, box)):
            raise UserError(f"{place} has a box {brief(str(box))}; allowed: four finite numbers, {form} in pixels")
        number = names.index(kind) if kind in names else kind
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(names):
            near = nearest(str(kind), names)
            raise UserError(f"{place} has an object of class {kind!r}; allowed: 0 to {len(names) - 1}, or a name{near}")
        left, upper, third, fourth = map(float, box)
        size = [third, fourth] if form == "xywh" else [third - left, fourth - upper]
        if min(size) < 0:
            told = f"{place} has a box {brief(str(box))}, which ends before it begins"
            raise UserError(f"{told}; next: box_format={'xyxy' if form == 'xywh' else 'xywh'}, or another box")
        found.append(([left, upper, *size], number))
    return found


class Boxes(images.Varied):
    """A split for Trainer: rows of `pixel_values`, float32 of shape (3, H, W), and `labels`, as the model's loss has
    them: {"class_labels": (n,), "boxes": (n, 4)}, centre and size as shares of the image's.

    `found` are the objects of each row; None where the rows have none to learn from. A row of a training split is
    mirrored with probability `flip`.
    """

    flip = 0.0

    def __init__(self, rows: Rows, processor: Any, found: Objects | None, seed: int = 0) -> None:
        super().__init__(rows, seed)
        self._processor, self._found = processor, found

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = images.opened(self._rows, index)
        if self._found is None:
            return {"pixel_values": self._processor(images=[image], return_tensors="pt")["pixel_values"][0]}
        found = self._found[index]
        if self.flip and self.draw(index).random() < self.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            found = [([image.width - box[0] - box[2], *box[1:]], kind) for box, kind in found]
        # The image processor asks for an `area`, as COCO has it, and leaves out a crowd; the loss reads neither.
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


def _one_of(raw: Any, keys: Sequence[str], place: str) -> str:
    found = next((key for key in keys if isinstance(raw, Mapping) and key in raw), None)
    if found is None:
        there = ", ".join(raw) if isinstance(raw, Mapping) else type(raw).__name__
        raise UserError(f"{place} has an object without {keys[0]} ({there}); allowed: {', '.join(keys)}")
    return found
