"""Paraphrase pairs that the project generates itself: the data of the quickstart.

A pair starts from a fact and a changed fact. A negative says one and then the other; a positive says one of the two,
drawn at random, in two ways. So a sentence by itself is as likely in a positive as in a negative, whatever the change
was. Shared words are evened out too: of several wordings of the second sentence the one is taken whose overlap with the
first is nearest to a target that does not depend on the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from hf_mps.errors import UserError
from hf_mps.finetune.pairs.draws import Draws
from hf_mps.finetune.pairs.facts import Fact, change, draw
from hf_mps.finetune.pairs.grammar import Choices, render
from hf_mps.finetune.pairs.words import tokens

__all__ = ["POSITIVE_SHARE", "generate", "majority"]

# 16 of every 25 rows are paraphrases.
_BLOCK, _POSITIVE = 25, 16
POSITIVE_SHARE = _POSITIVE / _BLOCK
_CANDIDATES = 16
# The share of words in common that pairs aim at: what both labels can reach.
_OVERLAP = (0.25, 0.65)

# sentence1 and sentence2 are str, label is 0 or 1.
Row = dict[str, Any]


def generate(rows_train: int, rows_dev: int, seed: int) -> dict[str, list[Row]]:
    """Generate labelled sentence pairs, the same for the same seed in every process and Python version.

    Returns `train` and `validation`, lists of rows `sentence1`, `sentence2` (str) and `label` (1 for a paraphrase, 0
    for a pair that says different things); 64 of 100 are paraphrases. Validation has names and wordings that are never
    in training. More rows only add rows: the first ones stay as they are.

    Raises UserError for a row count below 1 or a seed that is not a whole number from 0.
    """
    for name, number, least in (("rows_train", rows_train, 1), ("rows_dev", rows_dev, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise UserError(f"{name} must be a whole number of at least {least}, not {number!r}")
    return {
        "train": list(islice(_rows(Draws(2 * seed), held_out=False), rows_train)),
        "validation": list(islice(_rows(Draws(2 * seed + 1), held_out=True), rows_dev)),
    }


def majority(rows: list[Row]) -> dict[str, float]:
    """Return accuracy and F1 of the answer "always a paraphrase" on these rows: the baseline that a model must beat."""
    share = sum(row["label"] == 1 for row in rows) / len(rows)
    return {"accuracy": max(share, 1 - share), "f1": 2 * share / (1 + share)}


def _rows(draws: Draws, held_out: bool) -> Iterator[Row]:
    seen: set[str] = set()
    while True:
        labels = [1] * _POSITIVE + [0] * (_BLOCK - _POSITIVE)
        draws.shuffle(labels)
        for label in labels:
            pair = _pair(label, draws, held_out)
            while not seen.isdisjoint(pair):
                pair = _pair(label, draws, held_out)
            seen.update(pair)
            yield {"sentence1": pair[0], "sentence2": pair[1], "label": label}


def _pair(label: int, draws: Draws, held_out: bool) -> tuple[str, str]:
    facts = [fact := draw(draws, held_out), change(fact, draws, held_out)]
    draws.shuffle(facts)
    one, other = facts[0], facts[0] if label else facts[1]
    return _said(one, other, draws, held_out)


def _said(one: Fact, other: Fact, draws: Draws, held_out: bool) -> tuple[str, str]:
    """Say both facts, with as many shared words as a target drawn without regard to the label."""
    target = draws.between(*_OVERLAP)
    best: tuple[float, str, str] | None = None
    while best is None:
        first = Choices(draws)
        sentence = render(one, first, held_out)
        for _ in range(_CANDIDATES):
            second = render(other, Choices(draws, keep=draws.between(0, 1), first=first.made), held_out)
            if sentence == second or sentence[0].isdigit() or second[0].isdigit():
                continue
            miss = abs(overlap(sentence, second) - target)
            if best is None or miss < best[0]:
                best = (miss, sentence, second)
    return best[1], best[2]


def overlap(sentence1: str, sentence2: str) -> float:
    """Return the share of the words of both sentences that stand in both (Jaccard), from 0 to 1."""
    one, other = set(tokens(sentence1)), set(tokens(sentence2))
    return len(one & other) / len(one | other)
