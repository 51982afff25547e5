"""Images with a map of classes: read, varied together, and prepared by transformers' own image processor with PIL."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.media.images import Augmentation

# Classes that a palette of 8 bits has colours for.
COLOURED = 256
IGNORED = 255
"""The class of pixels that are neither learned nor counted (semantic_loss_ignore_index of transformers)."""


class Masks(images.Varied):
    """A split for Trainer: rows of `pixel_values`, float32 of shape (3, H, W), and of `labels`, int64 of shape (H, W),
    where they have a mask.

    `reduce` makes class 0 the one that is left out, and counts the others from 0 (ADE20K's masks need that).
    """

    def __init__(
        self,
        rows: Rows,
        processor: Any,
        classes: int,
        *,
        reduce: bool = False,
        augment: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(rows, seed)
        self._processor, self._classes, self._reduce, self.augment = processor, classes, reduce, augment

    def __getitem__(self, index: int) -> dict[str, Any]:
        if "mask" not in self._rows.dataset.column_names:
            return prepared(self._processor, images.opened(self._rows, index), None, reduce=False)
        image, mask = pair(self._rows, index)
        if self.augment is not None:
            image, mask = varied(image, mask, self.augment, self.draw(index))
        made = prepared(self._processor, image, mask, reduce=self._reduce)
        labels = made["labels"]
        # Metal reads past the classes without a word (pytorch#144824), so an unknown class is told here.
        known = (labels == IGNORED) | ((labels >= 0) & (labels < self._classes))
        if bool(known.all()):
            return made
        found = int(labels[~known].max()) + self._reduce
        told = f"mask has class {found}, and data.labels names {self._classes} classes, from {int(self._reduce)} on"
        way_on = "next: name every class, or reduce_labels=true where 0 means no class"
        raise UserError(f"{self._rows.place(index)}: {told}; {way_on}")


def prepared(processor: Any, image: Any, mask: Any, *, reduce: bool) -> dict[str, Any]:
    """Return what an image processor makes of a PIL image and its mask (an array, or None), without the batch."""
    settings = {} if mask is None else {"segmentation_maps": [mask]}
    made = processor(images=[image], do_reduce_labels=reduce, return_tensors="pt", **settings)
    return {name: made[name][0] for name in ("pixel_values", "labels") if name in made}


def pair(rows: Rows, index: int) -> tuple[Any, Any]:
    """Return a row's PIL image and its mask, an int32 array of shape (height, width).

    Raises UserError for what is no image, for a mask of colours and for one of another size.
    """
    row: Mapping[str, Any] = rows.dataset[index]
    image = images.opened_value(rows, index, row["image"])
    mask = images.opened_value(rows, index, row["mask"], "mask", _numbers)
    if mask.shape != image.size[::-1]:
        told = f"mask has {mask.shape[1]} x {mask.shape[0]} pixels, and the image {image.size[0]} x {image.size[1]}"
        raise UserError(f"{rows.place(index)}: {told}; allowed: the same")
    return image, mask


def mask_of(rows: Rows, index: int, *, reduce: bool) -> Any:
    """Return a row's mask with the classes as they are learned, IGNORED where none is."""
    import numpy

    mask = images.opened_value(rows, index, rows.dataset[index]["mask"], "mask", _numbers)
    return numpy.where((mask == 0) | (mask == IGNORED), IGNORED, mask - 1) if reduce else mask


def varied(image: Any, mask: Any, augment: Augmentation, draw: random.Random) -> tuple[Any, Any]:
    """Return the same drawn part of an image and its mask, perhaps both mirrored left to right."""
    from PIL import Image

    width, height = image.size
    left, upper, right, lower = images.part_of(width, height, augment.crop, draw)
    image, mask = image.crop((left, upper, right, lower)), mask[upper:lower, left:right]
    if draw.random() < augment.flip:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), mask[:, ::-1].copy()
    return image, mask


def png(classes: Any) -> bytes:
    """Return a PNG of an array of classes, (height, width): each pixel is its class's number, 8 bits with a palette.

    The colours are Pascal VOC's: the bits of the number spread over red, green and blue. More than 256 classes are grey
    numbers of 16 bits.
    """
    import numpy
    from PIL import Image

    if classes.max(initial=0) >= COLOURED:
        image = Image.fromarray(classes.astype(numpy.uint16))
    else:
        image = Image.fromarray(classes.astype(numpy.uint8))
        # The class's bits 0, 3 and 6 are red's highest, and so on.
        channels = ((number, channel) for number in range(COLOURED) for channel in range(3))
        spread = [[((number >> (3 * bit + at)) & 1) << (7 - bit) for bit in range(8)] for number, at in channels]
        image.putpalette(list(map(sum, spread)))
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def _numbers(mask: Any) -> Any:
    """Return the numbers of a PIL image; of a palette (mode P) the entries, which are the classes."""
    import numpy

    found = numpy.asarray(mask)
    if found.ndim != 2:
        raise ValueError(f"it has colours (mode {mask.mode}); allowed: one number a pixel (modes L, P, I, 1)")
    return found.astype(numpy.int32)
