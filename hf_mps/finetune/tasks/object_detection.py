"""Object detection: boxes around the objects of an image and their classes, learned as DETR and its kin do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import boxes, images
from hf_mps.finetune.media.boxes import Boxes, Object
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.metrics.boxes import NUMBERS, average_precision
from hf_mps.metrics.selection import choose

AUTO_CLASS = "AutoModelForObjectDetection"
METRICS = ("map",)
TRUTH = ("objects",)
# Images that are read and answered at a time.
AT_A_TIME = 64
SNIPPET = """from transformers import pipeline

detector = pipeline("object-detection", model=".")
print(detector("photo.jpg"))"""
# Width and height in pixels of the images of a smoke run, and the colours of their classes.
SMOKE_SIZE = (48, 40)
COLOURS = ((200, 40, 40), (40, 80, 200), (40, 180, 60), (220, 200, 40))


class Columns(schema.Columns):
    """The columns of the data by their roles: images, and the objects in each, with `bbox` and `category` of each."""

    image: str = "image"
    objects: str = "objects"


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
    data: Data
    image_size: int = Field(default=512, ge=32)
    box_format: boxes.Format = "xywh"
    flip: float = Field(default=0.5, ge=0, le=1)
    threshold: float = Field(default=0.5, ge=0, le=1)
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make images, boxes, model and metrics. Raises UserError for rows, classes or a checkpoint that cannot be used."""
    import transformers

    from hf_mps.finetune.models.detection_trainer import DetectionTrainer, unfilled
    from hf_mps.finetune.run.callbacks import Epochs

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    names, told = _names(recipe, rows["train"])
    for split in rows.values():
        images.refuse_missing(split)
    found = {split: _objects(one, names, recipe.box_format) for split, one in rows.items()}
    processor = boxes.square(checkpoint.image_processor(), recipe.image_size)
    config = labels.configure(checkpoint.config(), names, recipe.config_overrides)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    flips = {"train": recipe.flip}
    splits = {
        split: Boxes(one, processor, found[split], flip=flips.get(split, 0.0), seed=recipe.seed)
        for split, one in rows.items()
    }
    return Prepared(
        splits=splits,
        model=model,
        processing_class=processor,
        collator=boxes.collate,
        metrics=chosen,
        compute_metrics=lambda evaluated: chosen.of(
            average_precision(unfilled(evaluated.predictions), unfilled(evaluated.label_ids))
        ),
        baseline=metrics.Baseline("finds nothing", chosen.of(dict.fromkeys(NUMBERS, 0.0))),
        auto_class=AUTO_CLASS,
        pipeline_tag="object-detection",
        choices={
            "images": images.prepared_by(processor, "one shape"),
            "objects": _described(found["train"], recipe.flip),
            "labels": Choice(f"{len(names)} classes: {labels.listed(names)}", told),
            "model": weights,
        },
        trainer=DetectionTrainer,
        callbacks=[Epochs(splits["train"].begin)],
        predict=lambda trainer: _predicted(
            rows["validation"], trainer.predict(splits["validation"]).predictions, names, recipe.threshold
        ),
        snippet=SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved detector answers. Raises UserError for a checkpoint that cannot be used."""
    import transformers

    from hf_mps.finetune.models.detection_trainer import DetectionTrainer

    processor, config = checkpoint.image_processor(), checkpoint.config()
    names = labels.classes(config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows) -> list[dict[str, Any]]:
        images.refuse_missing(rows)
        return _predicted(rows, trainer.predict(Boxes(rows, processor, None)).predictions, names, recipe.threshold)

    return Answering(
        model=model,
        processing_class=processor,
        collator=boxes.collate,
        answers=answers,
        choices={"model": weights, "images": images.prepared_by(processor, "one shape")},
        trainer=DetectionTrainer,
        at_a_time=AT_A_TIME,
    )


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


def _names(recipe: Recipe, train: Rows) -> tuple[list[str], str]:
    """Return the classes, and where they are from. Raises UserError where nothing names them."""
    if recipe.data.labels:
        return recipe.data.labels, "data.labels in the recipe"
    if named := boxes.class_names(train):
        return named, labels.NAMED
    raise UserError("data.labels names no classes; next: data.labels=[cat, dog, …], in the order of their numbers")


def _objects(rows: Rows, names: Sequence[str], form: boxes.Format) -> list[list[Object]]:
    """Return the objects of every row. Raises UserError for what is none, and for a split without any."""
    column = rows.dataset["objects"]
    found = [boxes.objects(rows, index, raw, names, form) for index, raw in enumerate(column)]
    if not any(found):
        raise UserError(f"{rows.where}: no row has an object; allowed: one in some rows at least")
    return found


def _described(found: Sequence[Sequence[Object]], flip: float) -> Choice[str]:
    count, empty = sum(map(len, found)), sum(not one for one in found)
    varied = f"mirrored in {flip:.0%}, drawn from the seed, the epoch and the row alone" if flip else "not varied"
    left_out = f"; {empty} images have none" if empty else ""
    return Choice(f"{count} in {len(found)} training images", f"images are {varied}{left_out}")


def _predicted(rows: Rows, predictions: Any, names: Sequence[str], threshold: float) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv: each image's boxes, the best first, as transformers' pipeline has them."""
    found = []
    for at, best in enumerate(predictions):
        width, height = images.dimensions(rows, at, rows.dataset[at]["image"])
        told = [
            {"label": names[int(label)], "score": round(score, 4), "box": _pixels(box, width, height)}
            for label, score, *box in best.tolist()
            if label >= 0 and score >= threshold
        ]
        found.append({"row": rows.number(at), "image": images.name(rows, at), "prediction": told})
    return found


def _pixels(box: Sequence[float], width: int, height: int) -> dict[str, int]:
    """Return a box's corners in pixels, within the image, by their names."""
    sizes = {"xmin": width, "ymin": height, "xmax": width, "ymax": height}
    corners = zip(sizes.items(), box, strict=True)
    return {name: round(min(max(one, 0.0), 1.0) * size) for (name, size), one in corners}
