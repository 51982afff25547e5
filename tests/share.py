"""Which eighth of PyTorch's samples and of other long lists this run of the suite looks at; each night looks at all.

The commit decides, so that a failure comes again on the same commit, and eight commits look at everything once.
`TEST_SHARE=all` chooses everything (as `make nightly` does), `TEST_SHARE=3` the fourth eighth.
"""

from __future__ import annotations

import functools
import os
import subprocess
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import pytest

from tests import CHECKOUT

SHARES = 8


@functools.cache
def number() -> int | None:
    """Return the number that decides which share is looked at, or None for everything."""
    asked = os.environ.get("TEST_SHARE", "")
    if asked:
        return None if asked == "all" else int(asked)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return int(head.stdout, 16) if head.returncode == 0 else 0  # the sources' archive has no commits


def is_whole() -> bool:
    """Return whether this run looks at everything."""
    return number() is None


def has(name: str, shares: int = SHARES) -> bool:
    """Return whether this run looks at `name`, with one in so many of its list."""
    chosen = number()
    return chosen is None or chosen % shares == zlib.crc32(name.encode()) % shares


def of(names: Iterable[str]) -> list[int]:
    """Return the positions of the names that this run looks at."""
    return [position for position, name in enumerate(names) if has(name)]


def rotate(
    items: Iterable[pytest.Item],
    by: Callable[[pytest.Item], str],
    shares: int = SHARES,
    unit: Callable[[pytest.Item], str] = lambda item: item.nodeid,
) -> None:
    """Leave to each night what this run does not look at: of the units of a group all but a share, or all but one."""
    groups: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        groups.setdefault(by(item), {}).setdefault(unit(item), []).append(item)
    chosen = number()
    for units in groups.values():
        parts = min(shares, len(units))
        for position, together in enumerate(units.values()):
            if chosen is not None and position % parts != chosen % parts:
                for item in together:
                    item.add_marker(pytest.mark.nightly)


def nightly_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values as a test's parameters, all but `kept` with the marker `nightly`."""
    few = set(kept)
    return [value if value in few else pytest.param(value, marks=pytest.mark.nightly) for value in values]


T = TypeVar("T")


class OnDemand(dict[str, T], Generic[T]):
    """Values that a fixture makes when a test first asks for them, so that a few tests cost a few values."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        self[name] = self._make(name)
        return self[name]
