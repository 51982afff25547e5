"""Short generated texts that a tiny model can tell apart, for smoke runs: each class has words of its own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

SUBJECTS = ("the film", "a book", "this song", "her play", "our trip", "that meal", "his match", "the talk")
VERBS = ("was", "felt", "seemed", "turned out", "stayed", "became")
WORDS = (
    ("dull", "slow", "sad", "cold", "poor"),
    ("bright", "quick", "glad", "warm", "rich"),
    ("green", "round", "old", "wooden", "small"),
    ("loud", "sweet", "deep", "sharp", "new"),
)
# Rows of a smoke run: enough for a few steps and an evaluation.
ROWS = {"train": 32, "validation": 16}


def splits(wanted: Iterable[str] = ("train", "validation")) -> dict[str, int]:
    """The number of rows of each split: training's for `train`, validation's for all others."""
    return {split: ROWS["train" if split == "train" else "validation"] for split in wanted}


def word(draw: random.Random, kind: int) -> str:
    """A word of class `kind`; past the lists' end, classes have a word of a number each."""
    return draw.choice(WORDS[kind]) if kind < len(WORDS) else f"kind{kind}"


def sentence(draw: random.Random, kind: int) -> str:
    """A sentence of four to nine words about class `kind`."""
    parts = [f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {word(draw, kind)}" for _ in range(draw.choice((1, 2)))]
    return " and ".join(parts)


def sentences(draw: random.Random, count: int) -> list[str]:
    """`count` sentences about drawn classes, written as in a text: with a capital and a full stop."""
    return [f"{sentence(draw, draw.randrange(len(WORDS))).capitalize()}." for _ in range(count)]


def classes(count: int, kinds: int, draw: random.Random) -> list[int]:
    """`count` class ids, each class as often as the others (one row apart), in a drawn order."""
    ids = [number % kinds for number in range(count)]
    draw.shuffle(ids)
    return ids


def named(names: Sequence[str] | None, kind: int) -> str | int:
    """What a row says of its class: the name where there are names, or the id."""
    return names[kind] if names else kind
