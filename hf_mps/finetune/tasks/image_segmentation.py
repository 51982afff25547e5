"""Semantic segmentation: the class of every pixel, from images and masks of one number a pixel."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
from PIL import Image

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import labels, synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures, predictions
from hf_mps.finetune.tasks import Picture, Prepared
from hf_mps.finetune.tasks.image_classification import ImageTask
from hf_mps.metrics import Baseline, pixels

# Classes that a palette of 8 bits has colours for.
COLOURED = 256
IGNORED = 255
"""The class of pixels that are neither learned nor counted (semantic_loss_ignore_index of transformers)."""

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
    """The column of the image: a path, or bytes."""
    mask: str = "mask"
    """The column of the mask, an image of the classes' numbers."""


class Data(schema.Labelled):
    """Adds the columns, and `labels`: the class names in the order of the masks' numbers."""

    columns: Columns = Columns()


class Recipe(labels.Overridden):
    """Adds how training images are varied, and `reduce_labels`: 1 in a mask is the first class.

    `data.labels` may be left out where the checkpoint segments already.
    """

    data: Data
    augmentation: images.Augmentation | None = images.Augmentation(crop=[0.25, 1.0])
    reduce_labels: bool = False
    """true where class 0 of the masks means no class."""


class ImageSegmentation(ImageTask[Recipe]):
    """Learns the class of every pixel."""

    metrics = ("mean_iou",)
    truth = ("mask",)
    at_a_time = 16  # their logits are held: 10 MB for 150 classes at 128 x 128
    architectures = ("ForSemanticSegmentation",)
    keep = staticmethod(predictions.keep_logits)
    family = ("segformer", "image and mask")
    shows = "pictures"

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        recipe, config = self.recipe, self.checkpoint.config()
        chosen = self.measures()
        names, told = self._named(config)
        self.begin(names)
        self.processing_class.do_reduce_labels = False  # of masks of the data, and the saved one is for images alone
        splits = {split: self.inputs(some) for split, some in rows.items()}
        splits["train"].augment = recipe.augmentation
        config = labels.configure(config, names, recipe.config_overrides)
        config.semantic_loss_ignore_index = IGNORED
        self.load(config)
        first = rows["validation"].sample(list(range(min(pictures.SCENES, len(rows["validation"].dataset)))))
        return self.trained(
            rows,
            splits,
            metrics=chosen,
            compute_metrics=lambda evaluated: chosen.of(pixels.overlaps(evaluated.predictions.sum(axis=0))),
            baseline=self._baseline(rows, chosen.of),
            choices={
                "images": images.prepared_by(self.processing_class),
                "augmentation": images.described_augmentation(recipe.augmentation),
                "labels": Choice(f"{len(names)} classes: {labels.listed(names)}", told),
            },
            trainer_settings={"preprocess_logits_for_metrics": self._areas},
            # As a split of these rows alone would be answered: each with its mask.
            shown=lambda trainer: self.answers(trainer, first, splits["validation"]),
            figures=lambda predicted: self._figures(rows["validation"], predicted),
        )

    def inputs(self, rows: Rows) -> Masks:
        for role in ("image", "mask"):
            if role in rows.dataset.column_names:
                images.refuse_missing(rows, role)
        reduce = self.recipe.reduce_labels
        return Masks(rows, self.processing_class, len(self.names), reduce=reduce, seed=self.recipe.seed)

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each image's classes with their share, with its scores or, without a mask, with the model's own.

        Where there are masks, the model's own come with a few rows, for the picture of a run.
        """
        import torch

        labelled, drawn = "mask" in rows.dataset.column_names, {}
        if labelled:
            shown = pictures.spread(len(rows.dataset))
            some = rows.sample(shown)
            some = some.with_columns(some.dataset.remove_columns("mask"))
            drawn = dict(zip(shown, self.answers(trainer, some, self.inputs(some)), strict=True))
        for at, predicted in enumerate(trainer.predict(inputs).predictions):
            line = {"row": rows.number(at), "image": images.named(rows.dataset[at]["image"])}
            if labelled:
                scores = pixels.overlaps(predicted)  # of the areas that `_areas` has counted
                told = {name: round(float(scores[name]), 4) for name in ("mean_iou", "overall_accuracy")}
                mask = {"mask": drawn[at]["mask"]} if at in drawn else {}
                yield {**line, **told, "prediction": _shares(predicted[1], self.names), **mask}
                continue
            width, height = images.dimensions(rows, at, rows.dataset[at]["image"])
            found = _answers(torch.from_numpy(predicted)[None], (height, width))[0].numpy()
            counts = numpy.bincount(found.ravel(), minlength=len(self.names))
            yield {**line, "prediction": _shares(counts, self.names), "mask": Picture(png(found))}

    def _figures(self, rows: Rows, predicted: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        scenes = []
        for at, row in enumerate(predicted):
            if "mask" in row:
                truth = mask_of(rows, at, reduce=self.recipe.reduce_labels)
                scenes.append((images.opened(rows, at), truth, numpy.asarray(Image.open(io.BytesIO(row["mask"])))))
        return pictures.masks(scenes, self.names)

    def _named(self, config: Any) -> tuple[list[str], str]:
        """Return the classes, and where they are from. Raises UserError where nothing names them."""
        recipe = self.recipe
        if recipe.data.labels:
            return recipe.data.labels, "data.labels in the recipe"
        if any(name.endswith(self.architectures) for name in config.architectures or ()):
            return [config.id2label[number] for number in sorted(config.id2label)], f"those of {recipe.model}"
        told = "data.labels names no classes, and masks hold their numbers alone"
        order = f"in the order of the numbers from {int(recipe.reduce_labels)} on"
        raise UserError(f"{told}; next: data.labels=[ground, tree, …], {order}")

    def _baseline(self, rows: Mapping[str, Rows], chosen: Callable[[Mapping[str, float]], Any]) -> Baseline:
        """Return the scores of one class everywhere: the most frequent of the first training masks."""

        def present(split: str, most: int | None = None) -> Any:
            total = numpy.zeros(len(self.names))
            for at in range(len(rows[split].dataset))[:most]:  # a mask at a time: all do not fit into memory
                mask = mask_of(rows[split], at, reduce=self.recipe.reduce_labels)
                total += pixels.areas(mask, mask, len(self.names), IGNORED)[0]
            return total

        seen, total = present("train", SEEN), present("validation")
        answer = int(seen.argmax())
        shared, answered = numpy.zeros(len(self.names)), numpy.zeros(len(self.names))
        shared[answer], answered[answer] = total[answer], total.sum()
        name, share = self.names[answer], seen[answer] / max(1.0, seen.sum())
        what = f"always answers {name}, the class of {share:.1%} of the pixels"
        return Baseline(what, chosen(pixels.overlaps([shared, answered, total])))

    def _areas(self, logits: Any, truths: Any) -> Any:
        """Return of a batch each image's areas, shape (B, 3, classes), for metrics; of one without masks the logits."""
        import torch

        if truths is None:
            return predictions.logits_of(logits)
        answers = _answers(predictions.logits_of(logits), truths.shape[-2:]).cpu().numpy()
        pairs = zip(answers, truths.cpu().numpy(), strict=True)
        found = [torch.from_numpy(pixels.areas(one, truth, len(self.names), IGNORED)) for one, truth in pairs]
        return torch.stack(found).to(truths.device)

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Write an image of a rectangle on a ground, each in its class's colour, and its mask."""
        draw, (width, height), first = made.draw, SMOKE_SIZE, int(recipe.reduce_labels)
        kinds = range(first, first + min(len(COLOURS), len(recipe.data.labels or COLOURS)))
        mask = numpy.full((height, width), kinds[0], dtype=numpy.uint8)
        left, upper = draw.randrange(width // 2), draw.randrange(height // 2)
        mask[upper : upper + height // 2, left : left + width // 2] = draw.choice(kinds[1:])
        colours = numpy.array([(0, 0, 0)] * first + list(COLOURS), dtype=numpy.uint8)
        image, masked = made.save(Image.fromarray(colours[mask]), "-image"), made.save(Image.fromarray(mask), "-mask")
        return {"image": image, "mask": masked}


def _shares(counts: Any, names: Sequence[str]) -> str:
    """Return the classes of most pixels with their share, largest first."""
    total = max(1, int(counts.sum()))
    largest = sorted(range(len(names)), key=lambda number: -counts[number])[:SHOWN]
    return ", ".join(f"{names[number]} {counts[number] / total:.0%}" for number in largest if counts[number])


def _answers(logits: Any, size: Sequence[int]) -> Any:
    """Return the class of each pixel, (B, H, W), of logits (B, classes, h, w) at `size` (H, W), as transformers'
    post_process_semantic_segmentation computes it.
    """
    import torch

    with torch.no_grad():
        whole = torch.nn.functional.interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)
    return whole.argmax(dim=1)


class Masks(images.Varied):
    """A split for Trainer: rows of `pixel_values`, float32 of shape (3, H, W), and of `labels`, int64 of shape (H, W),
    where they have a mask.

    `reduce` makes class 0 the one that is left out, and counts the others from 0 (ADE20K's masks need that).
    """

    def __init__(self, rows: Rows, processor: Any, classes: int, *, reduce: bool, seed: int) -> None:
        super().__init__(rows, seed)
        self._processor, self._classes, self._reduce = processor, classes, reduce

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows.dataset[index]
        image = images.opened_value(self._rows, index, row["image"])
        if "mask" not in row:
            made = self._processor(images=[image], do_reduce_labels=False, return_tensors="pt")
            return {"pixel_values": made["pixel_values"][0]}
        mask = images.opened_value(self._rows, index, row["mask"], "mask", _numbers)
        if mask.shape != image.size[::-1]:
            told = f"mask has {mask.shape[1]} x {mask.shape[0]} pixels, and the image {image.size[0]} x {image.size[1]}"
            raise UserError(f"{self._rows.place(index)}: {told}; allowed: the same")
        if self.augment is not None:
            image, mask = varied(image, mask, self.augment, self.draw(index))
        made = self._processor(
            images=[image], segmentation_maps=[mask], do_reduce_labels=self._reduce, return_tensors="pt"
        )
        labels = made["labels"][0]
        # Metal reads past the classes without a word (pytorch#144824), so an unknown class is told here.
        known = (labels == IGNORED) | ((labels >= 0) & (labels < self._classes))
        if bool(known.all()):
            return {"pixel_values": made["pixel_values"][0], "labels": labels}
        found = int(labels[~known].max()) + self._reduce
        told = f"mask has class {found}, and data.labels names {self._classes} classes, from {int(self._reduce)} on"
        way_on = "next: name every class, or reduce_labels=true where 0 means no class"
        raise UserError(f"{self._rows.place(index)}: {told}; {way_on}")


def mask_of(rows: Rows, index: int, *, reduce: bool) -> Any:
    """Return a row's mask with the classes as they are learned, IGNORED where none is."""
    mask = images.opened_value(rows, index, rows.dataset[index]["mask"], "mask", _numbers)
    return numpy.where((mask == 0) | (mask == IGNORED), IGNORED, mask - 1) if reduce else mask


def varied(image: Any, mask: Any, augment: images.Augmentation, draw: random.Random) -> tuple[Any, Any]:
    """Return the same drawn part of an image and its mask, perhaps both mirrored left to right."""
    width, height = image.size
    left, upper, right, lower = images.part_of(width, height, augment.crop, draw)
    image, mask = image.crop((left, upper, right, lower)), mask[upper:lower, left:right]
    if draw.random() < augment.flip:
        # Copied, as torch takes no array whose stride is negative.
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), mask[:, ::-1].copy()
    return image, mask


def png(classes: Any) -> bytes:
    """Return a PNG of an array of classes, (height, width): each pixel is its class's number, 8 bits with a palette.

    The colours are Pascal VOC's: the bits of the number spread over red, green and blue. More than 256 classes are grey
    numbers of 16 bits.
    """
    if classes.max(initial=0) >= COLOURED:
        image = Image.fromarray(classes.astype(numpy.uint16))
    else:
        image = Image.fromarray(classes.astype(numpy.uint8))
        # The class's bits 0, 3 and 6 are red's highest, and so on.
        channels = ((number, channel) for number in range(COLOURED) for channel in range(3))
        spread = [[((number >> (3 * bit + at)) & 1) << (7 - bit) for bit in range(8)] for number, at in channels]
        image.putpalette(list(map(sum, spread)))
    return pictures.encoded(image)


def _numbers(mask: Any) -> Any:
    """Return the numbers of a PIL image; of a palette (mode P) the entries, which are the classes."""
    found = numpy.asarray(mask)
    if found.ndim != 2:
        raise ValueError(f"it has colours (mode {mask.mode}); allowed: one number a pixel (modes L, P, I, 1)")
    return found.astype(numpy.int32)
