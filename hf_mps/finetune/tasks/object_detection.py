"""Object detection: boxes around the objects of an image and their classes, learned as DETR and its kin do."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import boxes, images
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks._base import Prepared, Task
from hf_mps.metrics.boxes import NUMBERS, average_precision

# Width and height in pixels of the images of a smoke run, and the colours of their classes.
SMOKE_SIZE = (48, 40)
COLOURS = ((200, 40, 40), (40, 80, 200), (40, 180, 60), (220, 200, 40))


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


class Recipe(schema.Recipe):
    """Adds the side in pixels of the squares that images become, how boxes are written, and predictions.

    `box_format` is `xywh` (COCO: left, upper, width, height) or `xyxy` (left, upper, right, lower), in pixels. A
    training image is mirrored with probability `flip`. predictions.csv has the boxes of a score of `threshold` on.
    """

    task: Literal["object-detection"]
    """What the model learns to do."""
    data: Data
    image_size: int = Field(default=512, ge=32)
    """The longest side of an image in pixels."""
    box_format: boxes.Format = "xywh"
    """A box's numbers: left, upper and width, height (xywh) or right, lower (xyxy)."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """The probability of mirroring a training image."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """The least probability of an answer."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's configuration."""


class ObjectDetection(Task):
    """Learns the boxes around objects, and their classes."""

    name = "object-detection"
    recipe_class = Recipe
    metrics = ("map",)
    truth = ("objects",)
    at_a_time = 64
    architectures = ("ForObjectDetection",)
    family = ("yolos", "image and boxes")
    collator = staticmethod(boxes.collate)
    recipe: Recipe

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        from hf_mps.finetune.models.detection_trainer import unfilled
        from hf_mps.finetune.run.callbacks import Epochs

        recipe = self.recipe
        chosen = self.measures()
        names, told = recipe.data.labels, "data.labels in the recipe"
        if not names:
            names, told = boxes.class_names(rows["train"]), labels.NAMED
        if not names:
            raise UserError(
                "data.labels names no classes; next: data.labels=[cat, dog, …], in the order of their numbers"
            )
        for split in rows.values():
            images.refuse_missing(split)
        found = {split: _objects(one, names, recipe.box_format) for split, one in rows.items()}
        processor = boxes.square(self.checkpoint.image_processor(), recipe.image_size)
        self._begin(labels.configure(self.checkpoint.config(), names, recipe.config_overrides), names, processor)
        count, without = sum(map(len, found["train"])), sum(not one for one in found["train"])
        varied = f"mirrored in {recipe.flip:.0%}, drawn from the seed, the epoch and the row alone"
        varied, empty = varied if recipe.flip else "not varied", f"; {without} images have none" if without else ""
        flips = {"train": recipe.flip}
        splits = {
            split: boxes.Boxes(one, processor, found[split], flip=flips.get(split, 0.0), seed=recipe.seed)
            for split, one in rows.items()
        }
        return self.made(
            splits=splits,
            metrics=chosen,
            compute_metrics=lambda evaluated: chosen.of(
                average_precision(unfilled(evaluated.predictions), unfilled(evaluated.label_ids))
            ),
            baseline=metrics.Baseline("finds nothing", chosen.of(dict.fromkeys(NUMBERS, 0.0))),
            choices={
                "images": images.prepared_by(processor, "one shape"),
                "objects": Choice(f"{count} in {len(found['train'])} training images", f"images are {varied}{empty}"),
                "labels": Choice(f"{len(names)} classes: {labels.listed(names)}", told),
                **self.choices,
            },
            callbacks=[Epochs(splits["train"].begin)],
            predicted=(rows["validation"], splits["validation"]),
            figures=lambda predicted: self._figures(rows["validation"], found["validation"], predicted),
        )

    def _figures(
        self, rows: Rows, truths: Sequence[Sequence[boxes.Object]], predicted: Sequence[Mapping[str, Any]]
    ) -> dict[str, bytes]:
        scenes = []
        for at in pictures.spread(len(predicted)):
            found = []
            for one in predicted[at]["prediction"]:
                left, upper, right, lower = one["box"].values()
                found.append((one["label"], f"{one['score']:.2f}", left, upper, right - left, lower - upper))
            scenes.append((images.opened(rows, at), [(self.names[kind], "", *box) for box, kind in truths[at]], found))
        return pictures.boxes(scenes)

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        config = self.checkpoint.config()
        self._begin(config, labels.classes(config), self.checkpoint.image_processor())
        return self.made()

    def _begin(self, config: Any, names: Sequence[str], processor: Any) -> None:
        from hf_mps.finetune.models.detection_trainer import DetectionTrainer

        self.names, self.processing_class, self.trainer = names, processor, DetectionTrainer
        self.load(config)

    def inputs(self, rows: Rows) -> boxes.Boxes:
        images.refuse_missing(rows)
        return boxes.Boxes(rows, self.processing_class, None)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each image's boxes, the best first, as transformers' pipeline has them."""
        for at, best in enumerate(trainer.predict(inputs).predictions):
            size = 2 * images.dimensions(rows, at, rows.dataset[at]["image"])
            told = []
            for label, score, *box in best.tolist():
                if label >= 0 and score >= self.recipe.threshold:
                    corners = (round(min(max(one, 0.0), 1.0) * side) for one, side in zip(box, size, strict=True))
                    place = dict(zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
                    told.append({"label": self.names[int(label)], "score": round(score, 4), "box": place})
            yield {"row": rows.number(at), "image": images.name(rows, at), "prediction": told}

    @staticmethod
    def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Write images of one or two rectangles into `folder`, each in its class's colour, and return their boxes."""
        from PIL import Image, ImageDraw

        draw, named = random.Random(recipe.seed), recipe.data.columns
        names = recipe.data.labels
        kinds = range(min(len(COLOURS), len(names or COLOURS)))

        def row(split: str, number: int) -> dict[str, Any]:
            image = Image.new("RGB", SMOKE_SIZE, (30, 30, 30))
            found = []
            for _ in range(draw.choice((1, 2))):
                left, upper, kind = draw.randrange(28), draw.randrange(22), draw.choice(kinds)
                ImageDraw.Draw(image).rectangle((left, upper, left + 15, upper + 13), COLOURS[kind])
                box = [left, upper, 16, 14] if recipe.box_format == "xywh" else [left, upper, left + 16, upper + 14]
                found.append({"bbox": box, "category": synthetic.class_value(names, kind)})
            (folder / split).mkdir(exist_ok=True)
            name = f"{split}/{number:03}.png"
            image.save(folder / name)
            return {named.image: name, named.objects: found}

        rows = synthetic.splits_of(recipe.data)
        return {split: [row(split, number) for number in range(count)] for split, count in rows.items()}


def _objects(rows: Rows, names: Sequence[str], form: boxes.Format) -> list[list[boxes.Object]]:
    """Return the objects of every row. Raises UserError for what is none, and for a split without any."""
    found = [boxes.objects(rows, index, raw, names, form) for index, raw in enumerate(rows.dataset["objects"])]
    if not any(found):
        raise UserError(f"{rows.where}: no row has an object; allowed: one in some rows at least")
    return found
