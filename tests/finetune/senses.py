"""Tiny models that see or hear, with random weights, and what they are shown: scenes with masks or boxes, photos."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from tests.finetune import tiny

PAINTS = ((60, 60, 60), (220, 40, 40), (40, 60, 220))
"""Of the classes ground, red and blue."""
THINGS = {"red": (230, 30, 30), "blue": (30, 50, 230)}
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (40, 60, 220), "white": (245, 245, 245)}
ASKED = "What colour is this?"
BOXES = """# Red and blue things.
task: object-detection
model: yolos
data:
  files: {train: train.jsonl, validation: dev.jsonl}
  columns: {image: image, objects: objects}
  labels: [red, blue]
image_size: 32
"""
"""A recipe of scenes with boxes, as `boxed` makes them, without its training."""
MASKED, BOXED = (40, 32), (48, 32)
PHOTOS = [(64, 48), (40, 90), (200, 30)]


def segformer(place: Path) -> Path:
    from hf_mps.finetune import smoke
    from hf_mps.finetune.smoke.processors import Family

    smoke.write(Family("segformer", "image and mask", "", {}), place, [], 1)
    return place


def yolos(place: Path) -> Path:
    """It looks for at most three objects."""
    import torch
    from transformers import YolosConfig, YolosModel

    from hf_mps.finetune import smoke

    place.mkdir()
    smoke.image_processor(place, (32, 32), "YolosImageProcessor")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = YolosConfig(
        **size, image_size=[32, 32], patch_size=8, num_detection_tokens=3, use_mid_position_embeddings=False
    )
    YolosModel(config).save_pretrained(place)
    return place


def smol(place: Path, kind: str = "idefics3") -> Path:
    """A model of images and text: an Idefics3, SmolVLM's architecture, or another."""
    from hf_mps.finetune import smoke
    from hf_mps.finetune.smoke.processors import Family

    words = [f"It is {colour}. {ASKED} Answer briefly." for colour in COLOURS] * 4
    smoke.write(Family(kind, "image and text", "", {}), place, words, 1)
    return place


def painter(place: Path) -> Path:
    """A Stable Diffusion, and its VAE and text encoder."""
    from hf_mps.finetune.models import checkpoint, diffusion

    diffusion.write_tiny(checkpoint.KNOWN["stable-diffusion-v1-5/stable-diffusion-v1-5"][1], place, 1)
    return place


def ear(place: Path) -> Path:
    """A Whisper that takes two seconds, and its processor."""
    from hf_mps.finetune import smoke
    from hf_mps.finetune.smoke.processors import Family
    from hf_mps.finetune.tasks import speech_recognition

    family = Family("whisper", "sound", "", {"max_target_positions": 32})
    smoke.write(family, place, list(speech_recognition.SPELLED), 0)
    return place


def spoken(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write words spelled in tones; return their rows by split."""
    from hf_mps.finetune.tasks import speech_recognition

    recipe = SimpleNamespace(data=speech_recognition.Data.model_construct(columns=speech_recognition.Columns()))
    return speech_recognition.SpeechTask.smoke_rows(recipe, folder)


def listen(desk: Path, model: Path, recipe: str) -> Path:
    """Give the desk a recipe, its model `ear`, and sixteen and eight spoken rows of tones; return it."""
    shutil.copytree(model, desk / "ear")
    (desk / "sounds").mkdir()
    made = spoken(desk / "sounds")
    for split, name in (("train", "train"), ("validation", "dev")):
        lines = [row | {"audio": f"sounds/{Path(row['audio']).name}"} for row in made[split]]
        tiny.write_jsonl(desk / f"{name}.jsonl", lines)
    (desk / "my.yaml").write_text(recipe, encoding="utf-8")
    return desk


def masked(folder: Path, number: int) -> dict[str, Any]:
    """Write a rectangle of a class on the ground, noisy, and its mask; return its row."""
    from PIL import Image

    draw = random.Random(number)
    mask = numpy.zeros(MASKED[::-1], dtype=numpy.uint8)
    left, upper = draw.randrange(0, 20), draw.randrange(0, 14)
    mask[upper : upper + 16, left : left + 18] = 1 + number % 2
    noise = numpy.random.default_rng(number).integers(-25, 26, (*mask.shape, 3))
    pixels = numpy.clip(numpy.array(PAINTS)[mask] + noise, 0, 255).astype(numpy.uint8)
    Image.fromarray(pixels).save(folder / f"{number}.png")
    Image.fromarray(mask).save(folder / f"{number}-mask.png")
    return {"image": f"{number}.png", "mask": f"{number}-mask.png"}


def captioned(folder: Path, number: int) -> dict[str, Any]:
    """Write the image of `masked`; return its row with a caption."""
    return {"image": masked(folder, number)["image"], "text": f"rectangle {number}"}


def boxed(folder: Path, number: int) -> dict[str, Any]:
    """Write a rectangle of a colour about the middle; return its row."""
    from PIL import Image, ImageDraw

    draw = random.Random(number)
    kind, left, upper = list(THINGS)[number % 2], draw.randrange(12, 18), draw.randrange(4, 10)
    image = Image.new("RGB", BOXED, (20, 20, 20))
    ImageDraw.Draw(image).rectangle((left, upper, left + 19, upper + 17), THINGS[kind])
    image.save(folder / f"{number}.png")
    return {"image": f"{number}.png", "objects": [{"bbox": [left, upper, 20, 18], "category": kind}]}


def photo(folder: Path, number: int, colour: str) -> str:
    """Write a noisy image of a colour, of one of PHOTOS' sizes, and return its name."""
    from PIL import Image

    draw, (width, height) = random.Random(number), PHOTOS[number % len(PHOTOS)]
    base = COLOURS[colour]
    pixels = bytes(min(255, max(0, base[at % 3] + draw.randrange(-20, 21))) for at in range(3 * width * height))
    Image.frombytes("RGB", (width, height), pixels).save(folder / f"{number}.png")
    return f"{number}.png"


def questions(folder: Path, count: int = 8, first: int = 0) -> list[dict[str, Any]]:
    """Rows of an image, a question and its answer, the image's colour."""
    names = list(COLOURS)
    return [
        {"image": photo(folder, n, names[n % 4]), "question": ASKED, "answer": f"It is {names[n % 4]}."}
        for n in range(first, first + count)
    ]
