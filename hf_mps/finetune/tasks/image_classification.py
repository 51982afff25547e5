"""Image classification: the class of an image, from folders of one's own, files with paths, or the hub."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps import metrics
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.media.images import Augmentation, Images
from hf_mps.finetune.models import classification
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.finetune.tasks._base import Prepared

AUTO_CLASS = "AutoModelForImageClassification"
TRUTH = ("label",)
# Decoded images are large, and a batch alone is held; so many rows are read at a time.
AT_A_TIME = 128
SNIPPET = """from transformers import pipeline

classifier = pipeline("image-classification", model=".")
print(classifier("photo.jpg"))"""
MODES = "16 bits reduced to 8, transparency put on white"
# Sides of the images of a smoke run, in pixels; each class is a colour.
SMOKE_SIZE = (40, 32)
COLOURS = ((200, 40, 40), (40, 80, 200), (40, 180, 60), (220, 200, 40))


class Columns(schema.Columns):
    """The columns of the data by their roles; `image` holds paths, or images as Parquet and the hub have them."""

    image: str = "image"
    label: str = "label"


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the class names in the order of their ids."""

    columns: Columns = Columns()


class Recipe(schema.Recipe):
    """Adds how training images are varied, and `config_overrides` for the model's configuration."""

    task: Literal["image-classification"]
    data: Data
    augmentation: Augmentation | None = Augmentation()
    config_overrides: dict[str, Any] = Field(default_factory=dict)


def smoke_rows(recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write noise images into `folder`, whose colour is their class, and return their rows."""
    from PIL import Image

    draw, named = random.Random(recipe.seed), recipe.data.columns
    names = recipe.data.labels
    kinds = len(names) if names else 2

    def row(split: str, number: int, kind: int) -> dict[str, Any]:
        base = COLOURS[kind % len(COLOURS)]
        pixels = bytes(min(255, max(0, base[at % 3] + draw.randrange(-40, 41))) for at in range(3 * 40 * 32))
        file = folder / split / f"{number:03}.png"
        file.parent.mkdir(exist_ok=True)
        Image.frombytes("RGB", SMOKE_SIZE, pixels).save(file)
        return {named.image: f"{split}/{file.name}", named.label: synthetic.class_value(names, kind)}

    rows = synthetic.splits_of(recipe.data)
    return {
        split: [row(split, number, kind) for number, kind in enumerate(synthetic.classes(count, kinds, draw))]
        for split, count in rows.items()
    }


def prepare(recipe: Recipe, rows: dict[str, Rows], checkpoint: Checkpoint, device: str) -> Prepared:
    """Make images, model, collator and metrics from the rows of every split.

    Raises UserError for labels, images, a configuration or a checkpoint that cannot be used.
    """
    import transformers

    from hf_mps.finetune.run.callbacks import Epochs

    others = [rows[split] for split in rows if split != "train"]
    classes = labels.decide(rows["train"], others, recipe.data.labels, "single_label_classification")
    measured = metrics.of_labels(recipe.metrics or ["accuracy", "f1/macro"], recipe.task, len(classes.names))
    processor = checkpoint.image_processor()
    for split in rows.values():
        images.refuse_missing(split)
    config = labels.configure(checkpoint.config(), classes.names, recipe.config_overrides)
    if recipe.augmentation is not None:
        images.size(processor)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)
    ids = {split: [int(classes.encode(raw)) for raw in rows[split].dataset["label"]] for split in rows}
    varied = {"train": recipe.augmentation}
    splits = {split: Images(rows[split], ids[split], processor, varied.get(split), recipe.seed) for split in rows}
    return Prepared(
        splits=splits,
        model=model,
        processing_class=processor,
        collator=transformers.default_data_collator,
        metrics=measured,
        compute_metrics=lambda evaluated: measured.compute(
            classification.logits_of(evaluated.predictions).argmax(axis=-1), evaluated.label_ids
        ),
        baseline=measured.baseline(ids["validation"], train=ids["train"], names=classes.names),
        auto_class=AUTO_CLASS,
        pipeline_tag="image-classification",
        choices={
            "images": images.prepared_by(processor, MODES),
            "augmentation": images.described_augmentation(recipe.augmentation),
            **labels.choices(classes),
            "model": weights,
        },
        callbacks=[Epochs(splits["train"].begin)],
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
        predict=lambda trainer: _predicted(rows["validation"], trainer.predict(splits["validation"]), classes.names),
        figures=lambda predicted: _figures(predicted, classes.names),
        snippet=SNIPPET,
    )


def answer(recipe: Recipe, checkpoint: Checkpoint, chosen: Mapping[str, Any], device: str) -> Answering:
    """Return how a saved classifier answers. Raises UserError for a checkpoint that cannot be used."""
    import transformers

    processor, config = checkpoint.image_processor(), checkpoint.config()
    classes = labels.kept(config)
    model, weights = checkpoint.model(getattr(transformers, AUTO_CLASS), config=config)

    def answers(trainer: Any, rows: Rows, every: bool = False) -> list[dict[str, Any]]:
        images.refuse_missing(rows)
        evaluated = trainer.predict(Images(rows, None, processor, None, recipe.seed))
        return _predicted(rows, evaluated, classes.names, every)

    return Answering(
        model=model,
        processing_class=processor,
        collator=transformers.default_data_collator,
        answers=answers,
        every=partial(answers, every=True),
        choices={"model": weights, "images": images.prepared_by(processor, MODES), "labels": labels.described(classes)},
        trainer_settings={"preprocess_logits_for_metrics": classification.keep_logits},
        at_a_time=AT_A_TIME,
    )


def _predicted(rows: Rows, evaluated: Any, names: Sequence[str], every: bool = False) -> list[dict[str, Any]]:
    """Return the rows of predictions.csv; `every` as `classification.rows`."""
    count = len(rows.dataset)
    inputs = [{"row": rows.number(at), "image": images.name(rows, at)} for at in range(count)]
    logits = classification.logits_of(evaluated.predictions)
    return classification.rows(inputs, evaluated.label_ids, logits, names, every=every)


def _figures(predicted: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, bytes]:
    from hf_mps.finetune.report import classes

    return classes.confusion([(row["label"], row["prediction"]) for row in predicted], names)
