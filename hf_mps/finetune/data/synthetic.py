"""Short generated texts that a tiny model can tell apart, for smoke runs: no two classes share a word."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
PAINTS = tuple(COLOURS.values())
# Rows of a smoke run: enough for a few steps and an evaluation.
ROWS = {"train": 32, "validation": 16}


@dataclass
class MadeUp:
    """What rows of one split are made up from: the same `draw` for all of them, and `number`, each one's place."""

    draw: random.Random
    folder: Path
    split: str
    count: int
    number: int = 0
    kinds: list[int] = field(default_factory=list)

    def kind(self, kinds: int) -> int:
        """Return the row's class, one of `kinds`: in a drawn order, each as often as the others, give or take one.

        It is asked for before anything else is drawn.
        """
        if not self.number:
            self.kinds = [number % kinds for number in range(self.count)]
            self.draw.shuffle(self.kinds)
        return self.kinds[self.number]

    def save(self, image: Any, what: str = "") -> str:
        """Write the row's PIL image into the folder of its split, and return its path; `what` tells it from others."""
        name = f"{self.split}/{self.number:03}{what}.png"
        (self.folder / self.split).mkdir(exist_ok=True)
        image.save(self.folder / name)
        return name


def rows(
    recipe: schema.Recipe, folder: Path, row: Callable[[Any, MadeUp], dict[str, Any]], least: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Return what `row` makes up for each split of the recipe, the validation one that may be held out among them.

    `row` returns values by their roles. There are ROWS, or `least` where that is more.
    """
    draw, found = random.Random(recipe.seed), {}
    for split in dict.fromkeys((*load.splits_to_read(recipe.data), "validation")):
        made = MadeUp(draw, folder, split, max(ROWS["train" if split == "train" else "validation"], least))
        # The loop sets the attribute: each row is made with its own number.
        found[split] = [named(recipe, row(recipe, made)) for made.number in range(made.count)]
    return found


def named(recipe: schema.Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the recipe's columns from values by their roles; `translation.en` is a key of a dict."""
    row: dict[str, Any] = {}
    for role, column in recipe.data.columns.roles().items():
        *outer, last = column.split(".")
        here = row
        for name in outer:
            here = here.setdefault(name, {})
        here[last] = values[role]
    return row


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
    """Return a sentence with the doing of the pair `number`, about another thing."""
    return about_things()[(number + len(DOINGS)) % (len(THINGS) * len(DOINGS))][0]


def class_value(names: Sequence[str] | None, kind: int) -> str | int:
    """Return what a row holds for its class: the name where there are names, or the id."""
    return names[kind] if names else kind
