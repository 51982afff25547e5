"""Semantic segmentation: the class of every pixel, from images and masks of one number a pixel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images, masks
from hf_mps.finetune.media.images import Augmentation
from hf_mps.finetune.media.masks import IGNORED, Masks
from hf_mps.finetune.models import classification
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering, Picture
from hf_mps.finetune.tasks._base import Prepared
from hf_mps.metrics import pixels
from hf_mps.metrics.selection import choose

AUTO_CLASS = "AutoModelForSemanticSegmentation"
METRICS = ("mean_iou",)
TRUTH = ("mask",)
# Images that are answered at a time: their logits are held, 10 MB for 150 classes at 128 x 128.
AT_A_TIME = 16
SNIPPET = """from transformers import pipeline

segmenter = pipeline("image-segmentation", model=".")
print(segmenter("photo.jpg"))"""
# Training masks that tell the most frequent class.
SEEN = 200
# Classes of an image that predictions.csv names, largest first.
SHOWN = 5
# Width and height in pixels of the images of a smoke run, and the colours of their classes.
SMOKE_SIZE = (48, 40)
COLOURS = ((40, 40, 40), (200, 40, 40), (40, 80, 200), (40, 180, 60))


class Columns(schema.Columns):
    """The columns of the data by their roles; both hold paths, or images as Parquet and the hub have them."""

    image: str = "image"
    mask: str = "mask"


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the class names in the order of the masks' numbers."""

    columns: Columns = Columns()


class Recipe(schema.Recipe):
    """Adds how training images are varied, and `reduce_labels`: 0 in a mask is no class, and 1 the first one.

    `data.labels` may be left out where the checkpoint segments already, and its classes are meant.
    """

    task: Literal["image-segmentation"]
    data: Data
    augmentation: Augmentation | None = Augmentation(crop=[0.25, 1.0])
    reduce_labels: bool = False
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make images, masks, model and metrics. Raises UserError for rows, classes or a checkpoint that cannot be used."""
    import transformers

    from hf_mps.finetune.run.callbacks import Epochs

    chosen = choose(recipe.metrics, METRICS, recipe.task)
    for split in rows.values():
        images.refuse_missing(split)
        images.refuse_missing(split, "mask")
    processor, config = checkpoint.image_processor(), checkpoint.config()
    names, told = _names(recipe, config)
    config = labels.configure(config, names, recipe.config_overrides)
    config.semantic_loss_ignore_index = IGNORED
    processor.do_reduce_labels = False  # of masks of the data, and the saved one is for images alone
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    varied = {"train": recipe.augmentation}
    splits = {
        split: Masks(
            rows[split],
            processor,
            len(names),
            reduce=recipe.reduce_labels,
            augment=varied.get(split),
            seed=recipe.seed,
        )
        for split in rows
    }
    return Prepared(
        splits=splits,
        model=model,
        processing_class=processor,
        collator=transformers.default_data_collator,
        metrics=chosen,
        compute_metrics=lambda evaluated: chosen.of(pixels.overlaps(evaluated.predictions.sum(axis=0))),
        baseline=_baseline(rows, names, recipe.reduce_labels, chosen.of),
        auto_class=AUTO_CLASS,
        pipeline_tag="image-segmentation",
        choices={
            "images": images.prepared_by(processor),
            "augmentation": images.described_augmentation(recipe.augmentation),
            "labels": Choice(f"{len(names)} classes: {labels.listed(names)}", told),
            "model": weights,
        },
        callbacks=[Epochs(splits["train"].begin)],
        trainer_settings={"preprocess_logits_for_metrics": _areas(len(names))},
        predict=lambda trainer: _predicted(rows["validation"], trainer.predict(splits["validation"]), names),
        snippet=SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved model finds classes in images. Raises UserError for a checkpoint that cannot be used."""
    import numpy
    import transformers

    processor, config = checkpoint.image_processor(), checkpoint.config()
    names = labels.kept(config).names
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows) -> Iterator[dict[str, Any]]:
        images.refuse_missing(rows)
        evaluated = trainer.predict(Masks(rows, processor, len(names)))
        for at, logits in enumerate(evaluated.predictions):
            width, height = images.dimensions(rows, at, rows.dataset[at]["image"])
            found = _whole(logits, (height, width))
            yield {
                "row": rows.number(at),
                "image": images.name(rows, at),
                "prediction": _shares(numpy.bincount(found.ravel(), minlength=len(names)), names),
                "mask": Picture(masks.png(found)),
            }

    return Answering(
        model=model,
        processing_class=processor,
        collator=transformers.default_data_collator,
        answers=answers,
        choices={"model": weights, "images": images.prepared_by(processor)},
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
        at_a_time=AT_A_TIME,
    )


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write images of a rectangle on a ground into `folder`, each in its class's colour, and their masks."""
    import numpy
    from PIL import Image

    draw, named = random.Random(recipe.seed), recipe.data.columns
    first = int(recipe.reduce_labels)
    kinds = range(first, first + min(len(COLOURS), len(recipe.data.labels or COLOURS)))

    def row(split: str, number: int) -> dict[str, Any]:
        width, height = SMOKE_SIZE
        mask = numpy.full((height, width), kinds[0], dtype=numpy.uint8)
        left, upper = draw.randrange(width // 2), draw.randrange(height // 2)
        mask[upper : upper + height // 2, left : left + width // 2] = draw.choice(kinds[1:])
        colours = numpy.array([(0, 0, 0)] * first + list(COLOURS), dtype=numpy.uint8)
        (folder / split).mkdir(exist_ok=True)
        found = {}
        for role, array in (("image", colours[mask]), ("mask", mask)):
            found[role] = f"{split}/{number:03}-{role}.png"
            Image.fromarray(array).save(folder / found[role])
        return {named.image: found["image"], named.mask: found["mask"]}

    rows = synthetic.splits_of(recipe.data)
    return {split: [row(split, number) for number in range(count)] for split, count in rows.items()}


def _names(recipe: Recipe, config: Any) -> tuple[list[str], str]:
    """Return the classes, and where they are from. Raises UserError where nothing names them."""
    if recipe.data.labels:
        return recipe.data.labels, "data.labels in the recipe"
    if any(name.endswith("ForSemanticSegmentation") for name in config.architectures or ()):
        return [config.id2label[number] for number in sorted(config.id2label)], f"those of {recipe.model}"
    raise UserError(
        "data.labels names no classes, and masks hold their numbers alone; next: data.labels=[ground, tree, …], in the"
        " order of the numbers" + (" from 1 on" if recipe.reduce_labels else " from 0 on")
    )


def _areas(classes: int) -> Callable[[Any, Any], Any]:
    """Return Trainer's `preprocess_logits_for_metrics`: of a batch, each image's areas, shape (B, 3, classes)."""

    def areas(logits: Any, truths: Any) -> Any:
        import torch

        answers = _answers(classification.logits_of(logits), truths.shape[-2:]).cpu().numpy()
        pairs = zip(answers, truths.cpu().numpy(), strict=True)
        found = [torch.from_numpy(pixels.areas(one, truth, classes, IGNORED)) for one, truth in pairs]
        return torch.stack(found).to(truths.device)

    return areas


def _whole(logits: Any, size: Sequence[int]) -> Any:
    """Return the class of each pixel of one image at `size` (H, W), an array, of logits (classes, h, w)."""
    import torch

    return _answers(torch.from_numpy(logits)[None], size)[0].numpy()


def _shares(counts: Any, names: Sequence[str]) -> str:
    """Return the classes of most pixels with their share, largest first."""
    total = max(1, int(counts.sum()))
    largest = sorted(range(len(names)), key=lambda number: -counts[number])[:SHOWN]
    return ", ".join(f"{names[number]} {counts[number] / total:.0%}" for number in largest if counts[number])


def _answers(logits: Any, size: Sequence[int]) -> Any:
    """Return the class of each pixel, (B, H, W), of logits (B, classes, h, w) at `size` (H, W), as transformers'
    post_process_semantic_segmentation has it.
    """
    import torch

    with torch.no_grad():
        whole = torch.nn.functional.interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)
    return whole.argmax(dim=1)


def _baseline(
    rows: Mapping[str, Rows], names: Sequence[str], reduce: bool, chosen: Callable[[Mapping[str, float]], Any]
) -> metrics.Baseline:
    """Return the scores of one class everywhere: the most frequent of the first training masks."""
    import numpy

    def present(split: str, most: int | None = None) -> Any:
        count = len(rows[split].dataset)
        found = (
            masks.mask_of(rows[split], at, reduce=reduce) for at in range(count if most is None else min(most, count))
        )
        return sum((pixels.areas(one, one, len(names), IGNORED)[0] for one in found), numpy.zeros(len(names)))

    seen = present("train", SEEN)
    answer = int(seen.argmax())
    total = present("validation")
    shared, answered = numpy.zeros(len(names)), numpy.zeros(len(names))
    shared[answer], answered[answer] = total[answer], total.sum()
    what = f"always answers {names[answer]}, the class of {seen[answer] / max(1.0, seen.sum()):.1%} of the pixels"
    return metrics.Baseline(what, chosen(pixels.overlaps([shared, answered, total])))


def _predicted(rows: Rows, evaluated: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv: each image's scores, and the classes found in it with their share."""
    found = []
    for at, areas in enumerate(evaluated.predictions):
        scores = pixels.overlaps(areas)
        told = {name: round(float(scores[name]), 4) for name in ("mean_iou", "overall_accuracy")}
        found.append(
            {"row": rows.number(at), "image": images.name(rows, at), **told, "prediction": _shares(areas[1], names)}
        )
    return found
