"""Releases and bounds, compared by their numbers: each `import torch` asks, and to import `packaging` takes longer."""

from __future__ import annotations

import functools
import re

_BOUND = re.compile(r"(<|>=|==|!=)([\d.]+?)(?:\.\*)?")


@functools.cache
def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu" and "2.13.0a0". Raises ValueError for none."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"not a version: {version!r}")
    return tuple(int(number) for number in found[0].split("."))


@functools.cache
def within(version: str | tuple[int, ...], bounds: str) -> bool:
    """Whether a version, or its numbers, are within bounds like ">=2.12,<2.15" or "!=26.4.*"; "==2.14" has 2.14.1 too.

    Raises ValueError for a comparison other than <, >=, == and !=.
    """
    release = numbers(version) if isinstance(version, str) else version
    for bound in filter(None, bounds.split(",")):
        if (found := _BOUND.fullmatch(bound)) is None:
            raise ValueError(f"not a bound: {bound!r}; allowed are <, >=, == and != before a release")
        comparison, limit = found[1], numbers(found[2])
        # "==2.14" has 2.14.1 too: as many numbers are compared as the bound has.
        alike = release < limit if comparison in ("<", ">=") else release[: len(limit)] == limit
        if alike is not (comparison in ("<", "==")):
            return False
    return True


def torch_release() -> tuple[int, ...]:
    """Return the numbers of the installed torch: (2, 13, 0)."""
    import torch

    return numbers(torch.__version__)
