"""Kernels that changed between releases: the digest of each one's LLVM module without names and metadata."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from hf_mps.metal.kernels import metallib, store

_METADATA = re.compile(r",? ![\w.]+(?: !\d+)?| #\d+")
_SYMBOL = re.compile(r"@[\w.$]+|@\"[^\"]+\"")
_KEPT = ("define", "declare", "  ", "@", "}", "%")


class Changes(NamedTuple):
    """What became of the kernels from one release to the next."""

    before: str
    after: str
    same: list[str]
    changed: list[str]
    added: list[str]
    removed: list[str]


def between(before: str, after: str) -> Changes:
    """Compare two fetched releases. Kernels whose bitcode is equal are not read."""
    old, new = store.open_library(before), store.open_library(after)
    same: list[str] = []
    changed: list[str] = []
    for name in old:
        if name in new:
            alike = old[name] == new[name] or digest(str(metallib.parse(old, name))) == digest(
                str(metallib.parse(new, name))
            )
            (same if alike else changed).append(name)
    added, removed = [name for name in new if name not in old], [name for name in old if name not in new]
    return Changes(before, after, same, changed, added, removed)


def digest(text: str) -> str:
    """Of the instructions alone: labels and values are numbered anyway, functions get numbers as they come."""
    numbers: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        name = found[0]
        return name if name.startswith(("@air.", "@llvm.")) else numbers.setdefault(name, f"@{len(numbers)}")

    lines = []
    for line in text.splitlines():
        if line.startswith(_KEPT) and line.strip():
            lines.append(_SYMBOL.sub(numbered, _METADATA.sub("", line.partition(" ; ")[0].rstrip())))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
