"""Short generated texts that a tiny model can tell apart, for smoke runs: no two classes share a word."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_mps.finetune.data import load
from hf_mps.finetune.recipe import schema

SUBJECTS = ("the film", "a book", "this song", "her play", "our trip", "that meal", "his match", "the talk")
VERBS = ("was", "felt", "seemed", "turned out", "stayed", "became")
WORDS = (
    ("dull", "slow", "sad", "cold", "poor"),
    ("bright", "quick", "glad", "warm", "rich"),
    ("green", "round", "old", "wooden", "small"),
    ("loud", "sweet", "deep", "sharp", "new"),
)
THINGS = ("kite", "drum", "boat", "lamp", "tent", "coin")
DOINGS = ("bought", "painted", "lost", "sold")
COLOURS = {"red": (200, 40, 40), "blue": (40, 80, 200), "green": (40, 180, 60), "yellow": (220, 200, 40)}
# Rows of a smoke run: enough for a few steps and an evaluation.
ROWS = {"train": 32, "validation": 16}


def splits(wanted: Iterable[str] = ("train", "validation")) -> dict[str, int]:
    """Return the number of rows of each split: training's for `train`, validation's for all others."""
    return {split: ROWS["train" if split == "train" else "validation"] for split in wanted}


def splits_of(data: schema.Data) -> dict[str, int]:
    """Return the same for the splits that `data` reads, and the validation one that may be held out of them."""
    return splits((*load.splits_to_read(data), "validation"))


def word(draw: random.Random, kind: int) -> str:
    """Return a word of class `kind`; past the lists' end, each class has one numbered word."""
    return draw.choice(WORDS[kind]) if kind < len(WORDS) else f"kind{kind}"


def plain_image(draw: random.Random, folder: Path, name: str, size: tuple[int, int]) -> str:
    """Write an image of one colour, of `size` (width, height) in pixels, to `name` in `folder`; return the colour."""
    from PIL import Image

    colour = draw.choice(list(COLOURS))
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, COLOURS[colour]).save(file)
    return colour


def sentence(draw: random.Random, kind: int) -> str:
    """Return a sentence of four to nine words about class `kind`."""
    parts = [f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {word(draw, kind)}" for _ in range(draw.choice((1, 2)))]
    return " and ".join(parts)


def sentences(draw: random.Random, count: int) -> list[str]:
    """Return `count` sentences about drawn classes, with a capital and a full stop."""
    return [f"{sentence(draw, draw.randrange(len(WORDS))).capitalize()}." for _ in range(count)]


def about_things() -> list[tuple[str, str]]:
    """Return 24 pairs of sentences, the second of which says of one of THINGS what the first one does."""
    return [(f"Ada {doing} a {thing}.", f"A {thing} was {doing} by Ada.") for thing in THINGS for doing in DOINGS]


def about_another(number: int) -> str:
    """Return the first sentence of the pair `number`, about another thing."""
    return about_things()[(number + 7) % len(THINGS) * len(DOINGS) + number % len(DOINGS)][0]


def classes(count: int, kinds: int, draw: random.Random) -> list[int]:
    """Return `count` class ids in a drawn order, each class as often as the others, give or take one."""
    ids = [number % kinds for number in range(count)]
    draw.shuffle(ids)
    return ids


def class_value(names: Sequence[str] | None, kind: int) -> str | int:
    """Return what a row holds for its class: the name where there are names, or the id."""
    return names[kind] if names else kind
