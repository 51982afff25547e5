"""Images for a model: decoded and prepared one by one with PIL, and augmented anew in each epoch.

transformers prepares images with torchvision where it is installed and with PIL elsewhere, and the two round
differently. Here PIL always does it: a run gets the same pixels on every machine, and torchvision is not needed.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field, field_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.recipe import schema

# Aspect ratio (width / height) of a drawn part, and the number of tries: Szegedy et al., "Going deeper with
# convolutions" (arXiv 1409.4842), as in torchvision's RandomResizedCrop.
RATIO = (3 / 4, 4 / 3)
TRIES = 10
# EXIF's tag of how an image was held, and from which value on width and height change places.
ORIENTATION, SIDEWAYS = 0x0112, 5


class Augmentation(schema.Section):
    """How a training image is varied: cropped to a share of its area within `crop` (least, greatest), and mirrored left
    to right with probability `flip`.
    """

    crop: list[float] = Field(default=[0.08, 1.0], min_length=2, max_length=2)
    """The least and the greatest share of the area that is cropped."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """The probability of mirroring an image."""

    @field_validator("crop")
    @classmethod
    def _shares(cls, value: list[float]) -> list[float]:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError(f"is {value}; allowed: the least and the greatest share of the area, above 0 and up to 1")
        return value

    def __str__(self) -> str:
        return f"{self.crop[0]:.0%} to {self.crop[1]:.0%} of the area, mirrored in {self.flip:.0%}"


class Varied:
    """Rows that are varied anew in each epoch: what is drawn for one depends on seed, epoch and row alone.

    A resumed run sees what it would have seen, with any number of worker processes.
    """

    augment: Augmentation | None = None

    def __init__(self, rows: Rows, seed: int) -> None:
        import torch

        self._rows, self._seed = rows, seed
        # In shared memory: persistent workers see the next epoch too.
        epoch: Any = torch.zeros((), dtype=torch.int64)
        self._epoch = epoch.share_memory_()

    def __len__(self) -> int:
        return len(self._rows.dataset)

    def begin(self, epoch: int) -> None:
        """Vary the rows as in epoch `epoch`, counted from 0.

        The name `set_epoch` is avoided: Accelerate's data loader calls that, but not in the epoch in which a run
        resumes (DataLoaderShard.set_epoch stops at the sampler that skips what was seen).
        """
        self._epoch.fill_(epoch)

    def draw(self, index: int) -> random.Random:
        """Return the random numbers of one row in this epoch."""
        return random.Random(f"{self._seed} {int(self._epoch)} {index}")


class Images(Varied):
    """A split for Trainer: rows of `pixel_values`, float32 of shape (3, height, width), and `labels` where it has any.

    They are augmented where `augment` says how.
    """

    def __init__(self, rows: Rows, labels: Sequence[int] | None, processor: Any, seed: int) -> None:
        super().__init__(rows, seed)
        self.labels, self._processor = labels, processor

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, settings = opened(self._rows, index), {}
        if self.augment is not None:
            resample = getattr(self._processor, "resample", None)
            image = augmented(image, self.augment, size(self._processor), resample, self.draw(index))
            # What was cut out has the processor's size already, and would be cut once more.
            settings = {"do_resize": False, "do_center_crop": False}
        pixels = self._processor(image, return_tensors="pt", **settings)["pixel_values"][0]
        return {"pixel_values": pixels} | ({"labels": self.labels[index]} if self.labels is not None else {})


def rgb(image: Any) -> Any:
    """Return a PIL image of any mode in 8-bit RGB; transparency is put on white, as on a page.

    Grey of 16 bits (modes I;16 and I) is scaled by 65535, its white: PIL's own conversion would make all above 255
    white. Floats (mode F) are scaled from 0 to 1. Raises ValueError for values outside.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        values = numpy.asarray(image).astype(numpy.float32)
        white = 1.0 if image.mode == "F" else 65535.0
        # Not scaled by the image's own extremes: two images of equal brightness would come out different.
        if not (numpy.isfinite(values).all() and values.min() >= 0 and values.max() <= white):
            told = f"its values go from {values.min():g} to {values.max():g}"
            raise ValueError(f"{told}; allowed: 0 to {white:g} in mode {image.mode}")
        image = Image.fromarray(numpy.rint(values * (255 / white)).astype(numpy.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def opened(rows: Rows, index: int) -> Any:
    """Return a row's image as `rgb` makes it, turned as its EXIF data say.

    Raises UserError, naming the row, for what is no image, is cut off, or has more pixels than Pillow opens.
    """
    return opened_value(rows, index, rows.dataset[index]["image"])


def opened_value(rows: Rows, index: int, value: Any, role: str = "image", made: Callable[[Any], Any] = rgb) -> Any:
    """Return as `opened` the image that `value` is, of column `role` in row `index` or in its list.

    `made` is called with the PIL image as its file has it, turned, in place of `rgb`.
    """
    content = rows.content_of(value, index, role)
    place = f"{rows.place(index)}: {role.removesuffix('s')} {named(value)}".rstrip()
    try:
        with Image.open(io.BytesIO(content)) as image:
            return made(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise UserError(f"{place} is no image that Pillow can read; allowed: PNG, JPEG and the like") from error
    except Image.DecompressionBombError as error:
        most = f"{2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} million pixels"
        raise UserError(f"{place} has more than the {most} that Pillow opens; next: save it smaller") from error
    except (MemoryError, UserError):
        raise
    except Exception as error:  # a decoder raises anything for a truncated file: struct.error, KeyError, …
        problem = f"cannot be decoded: {first_line(error)}"
        raise UserError(f"{place} {problem}; next: save it again, or leave it out") from error


def dimensions(rows: Rows, index: int, value: Any, role: str = "image") -> tuple[int, int]:
    """Return the (width, height) in pixels of the image that `value` is, once turned; only its header is read.

    Raises UserError as `opened`.
    """
    try:
        with Image.open(io.BytesIO(rows.content_of(value, index, role))) as image:
            width, height = image.size
            turned = image.getexif().get(ORIENTATION, 1) >= SIDEWAYS
    except UserError:
        raise
    except Exception:  # whatever a decoder raises of a broken file: the whole image says it better
        width, height = opened_value(rows, index, value, role).size
        turned = False
    return (height, width) if turned else (width, height)


def named(value: Any) -> str:
    """Return the file of the image that `value` of a row is; empty where the data do not say."""
    return (value.get("path") if isinstance(value, dict) else value) or ""


def augmented(image: Any, how: Augmentation, shape: tuple[int, int], resample: int | None, draw: random.Random) -> Any:
    """Crop a drawn part of a PIL image, resize it to `shape` (height, width), and perhaps mirror it."""
    width, height = image.size
    part = image.resize(shape[::-1], resample=resample, box=part_of(width, height, how.crop, draw))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < how.flip else part


def part_of(width: int, height: int, shares: Sequence[float], draw: random.Random) -> tuple[int, int, int, int]:
    """Return the corners (left, upper, right, lower) of a part with a drawn share of the area and a drawn aspect ratio.

    Where TRIES draws do not fit into the image, return the largest central part with an aspect ratio within RATIO.
    """
    for _ in range(TRIES):
        area = width * height * draw.uniform(*shares)
        shape = math.exp(draw.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            left, upper = draw.randint(0, width - across), draw.randint(0, height - down)
            return left, upper, left + across, upper + down
    across, down = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, upper = (width - across) // 2, (height - down) // 2
    return left, upper, left + across, upper + down


def size(processor: Any) -> tuple[int, int]:
    """Return the height and width in pixels of a processor's output. Raises UserError where they are not fixed."""
    cropped = getattr(processor, "do_center_crop", False) and getattr(processor, "crop_size", None)
    said = dict(cropped or processor.size)
    if said.get("height") and said.get("width"):
        return int(said["height"]), int(said["width"])
    if said.get("shortest_edge"):
        return int(said["shortest_edge"]), int(said["shortest_edge"])
    told = f"the model's image processor names no fixed size ({said}), so images cannot be cropped to it"
    raise UserError(f"{told}; next: augmentation=null")


def resize(processor: Any, size: dict[str, int]) -> None:
    """Set the size to which an image processor brings images, in the type that its class has for it."""
    processor.size = size if isinstance(processor.size, dict) else type(processor.size)(**size)


def prepared_by(processor: Any, *further: str) -> Choice[str]:
    """Return the size of a processor's output, with what prepares images as the reason, and anything `further`."""
    said = ", ".join(f"{name} {pixels}" for name, pixels in dict(processor.size).items() if pixels)
    return Choice(f"{said} pixels", "; ".join((f"by {type(processor).__name__}, with PIL on any machine", *further)))


def described_augmentation(augmentation: Augmentation | None) -> Choice[str]:
    """Return how training images are varied, with the reason."""
    if augmentation is None:
        return Choice("none", "augmentation in the recipe")
    return Choice(str(augmentation), "drawn from seed, epoch and row alone: a resumed run sees the same images")


def refuse_missing(rows: Rows, role: str = "image") -> None:
    """Raise UserError for the first row whose image file is missing or no image, before a run begins."""
    for index, value in enumerate(rows.dataset[role]):
        said = value.get("path") if isinstance(value, dict) else value
        if isinstance(value, dict) and value.get("bytes") is not None:
            continue  # decoded later: decoding all of them now would take long
        if not isinstance(said, str):
            rows.content_of(value, index, role)  # which refuses it
            continue
        try:
            with Image.open(rows.path(said)):  # the header alone
                pass
        except Exception:  # whatever a decoder raises of a broken file
            opened_value(rows, index, value, role)
