"""Image classification: the class of an image, from your own folders, files with paths, or the hub.

Other tasks of images share `ImageTask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from hf_mps import metrics
from hf_mps.core.choice import Choice
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import SPLITS, Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures, predictions
from hf_mps.finetune.tasks import Prepared, R, Task

MODES = "16 bits reduced to 8, transparency put on white"
# Sides of the images of a smoke run, in pixels.
SMOKE_SIZE = (40, 32)


class ImageTask(Task[R]):
    """A task whose model tells the classes `names` apart."""

    names: Sequence[str]

    def begin(self, names: Sequence[str]) -> None:
        """Open the image processor."""
        self.names, self.processing_class = names, self.checkpoint.image_processor()

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        config = self.checkpoint.config()
        self.begin(labels.classes(config))
        self.load(config)
        return self.made()

    def trained(
        self, rows: Mapping[str, Rows], splits: Mapping[str, Any], choices: Mapping[str, Choice[Any]], **parts: Any
    ) -> Prepared:
        """Return `made` for `splits` of `rows`, of which those to train on are varied anew in each epoch.

        `choices` come before those about the model.
        """
        from hf_mps.finetune.run.callbacks import Epochs

        predicted, varied = (rows["validation"], splits["validation"]), Epochs(splits["train"].begin)
        return self.made(predicted, splits=splits, callbacks=[varied], choices={**choices, **self.choices}, **parts)


class Columns(schema.Columns):
    """The columns of the data by their roles; `image` holds paths, or images as Parquet and the hub have them."""

    image: str = "image"
    """The column of the image: a path, or bytes."""
    label: str = "label"
    """The column of the label."""


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the class names in the order of their ids."""

    columns: Columns = Columns()


class Recipe(labels.Overridden):
    """Adds how training images are varied."""

    data: Data
    augmentation: images.Augmentation | None = images.Augmentation()


class ImageClassification(ImageTask[Recipe]):
    """Learns the class of an image."""

    truth = ("label",)
    at_a_time = 128  # decoded images are large
    has_probabilities = True
    architectures = ("ForImageClassification",)
    shape = "image"
    keep = staticmethod(predictions.keep_logits)
    family = ("vit", "image")

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe = self.recipe
        others = [rows[split] for split in rows if split != "train"]
        classes = labels.decide(rows["train"], others, recipe.data.labels, "single_label_classification")
        self.classes = classes
        measured = metrics.of_labels(recipe.metrics or ["accuracy", "f1/macro"], recipe.task, len(classes.names))
        self.begin(classes.names)
        if recipe.augmentation is not None:
            images.size(self.processing_class)  # refuses a processor that names none
        splits = {split: self.inputs(some) for split, some in rows.items()}
        splits["train"].augment = recipe.augmentation
        self.load(labels.configure(self.checkpoint.config(), classes.names, recipe.config_overrides))
        ids = {split: splits[split].labels for split in SPLITS}
        return self.trained(
            rows,
            splits,
            metrics=measured,
            compute_metrics=lambda evaluated: measured.compute(
                predictions.logits_of(evaluated.predictions).argmax(axis=-1), evaluated.label_ids
            ),
            baseline=lambda: measured.baseline(ids["validation"], train=ids["train"], names=classes.names),
            choices={
                "images": images.prepared_by(self.processing_class, MODES),
                "augmentation": images.described_augmentation(recipe.augmentation),
                **labels.choices(classes, rows["train"]),
            },
            figures=lambda predicted: pictures.confusion(predicted, classes.names),
        )

    def inputs(self, rows: Rows) -> images.Images:
        images.refuse_missing(rows)
        known = "label" in rows.dataset.column_names
        ids = [int(self.classes.encode(raw)) for raw in rows.dataset["label"]] if known else None
        return images.Images(rows, ids, self.processing_class, self.recipe.seed)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> list[dict[str, Any]]:
        evaluated = trainer.predict(inputs)
        files = map(images.named, rows.dataset["image"])
        given = [{"row": rows.number(at), "image": file} for at, file in enumerate(files)]
        logits = predictions.logits_of(evaluated.predictions)
        return predictions.rows(given, evaluated.label_ids, logits, self.names, every=every)

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Write a noise image, whose colour is its class."""
        names, draw = recipe.data.labels, made.draw
        kind = made.kind(len(names) if names else 2)
        base = synthetic.PAINTS[kind % len(synthetic.PAINTS)]
        pixels = bytes(min(255, max(0, base[at % 3] + draw.randrange(-40, 41))) for at in range(3 * 40 * 32))
        image = made.save(Image.frombytes("RGB", SMOKE_SIZE, pixels))
        return {"image": image, "label": synthetic.class_value(names, kind)}
