"""Reward functions as an installed package has them, right ones and wrong ones."""

from __future__ import annotations

from typing import Any

CONSTANT = 3.0


def low(completion_ids: list[list[int]]) -> list[float]:
    """The share of tokens with small numbers: half of them for a model that has learned nothing."""
    return [sum(one < 200 for one in ids) / len(ids) for ids in completion_ids]


def solved(completions: list[Any], solution: list[str]) -> list[float]:
    """Asks for the answer under a name of its own."""
    return [float(said[-1]["content"] == right) for said, right in zip(completions, solution, strict=True)]


def sometimes(prompts: list[Any], **_: Any) -> list[float | None]:
    """Applies to every other row."""
    return [None if place % 2 else 1.0 for place in range(len(prompts))]


def too_few(completions: list[Any], **_: Any) -> list[float]:
    return [1.0]


def one_number(**_: Any) -> float:
    return 1.0


def words(completions: list[Any], **_: Any) -> list[str]:
    return ["good"] * len(completions)


def endless(completions: list[Any], **_: Any) -> list[float]:
    return [float("inf")] * len(completions)


def broken(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("score")


async def later(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


class Kind:
    pass
