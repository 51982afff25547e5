"""What the name of a kernel says: PyTorch puts family, layout, element types and sizes into it, in that order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

# The element types of Metal as PyTorch's host code spells them, with the C and the Python spellings of some kernels.
TYPES = frozenset(
    [
        *(
            "bfloat",
            "bool",
            "char",
            "double",
            "float",
            "half",
            "int",
            "long",
            "short",
            "uchar",
            "uint",
            "ulong",
            "ushort",
        ),
        *("int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t"),
        *("float16", "float32", "bfloat16"),
    ]
)
LAYOUTS = frozenset(["broadcast", "cast", "castout", "dense", "ilp", "ilp4", "lhs", "rhs", "scalar", "strided"])

_VECTOR = re.compile(r"(bfloat|float|half)[234]")
# 32, 64bit, u16 and i64 (the width of an index), tptg512, tg128, bq32 and the like (the tile), mask…, …Params.
_SIZE = re.compile(r"\d+|\d+bit|[iu](8|16|32|64)|(bq|tg|tptg)\d+|mask\w+|\w+Params")


class Family(NamedTuple):
    """Kernels that share the words before layout, types and sizes."""

    name: str
    kernels: int
    types: tuple[str, ...]
    """The element types in their names, the most frequent first."""


def family(kernel: str) -> str:
    """The words of a kernel's name that stand before its layout, types and sizes: `rms_norm` of `rms_norm_float`."""
    words = kernel.split("_")
    for place, word in enumerate(words):
        if place and (word in LAYOUTS or _SIZE.fullmatch(word) or _type_at(words, place)):
            return "_".join(words[:place])
    return kernel


def types(kernel: str) -> list[str]:
    """The element types in a kernel's name, in its order; none where it has none."""
    words = kernel.split("_")
    return [found for place in range(1, len(words)) if (found := _type_at(words, place))]


def table(kernels: Iterable[str]) -> list[Family]:
    """The families of some kernels, by name."""
    counts: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    for kernel in kernels:
        name = family(kernel)
        counts[name] += 1
        found.setdefault(name, Counter()).update(set(types(kernel)))
    return [
        Family(name, counts[name], tuple(sorted(found[name], key=lambda each: (-found[name][each], each))))
        for name in sorted(counts)
    ]


def _type_at(words: list[str], place: int) -> str:
    """The element type that the words name from `place` on, or an empty string: int64_t is two words."""
    word, longer = words[place], "_".join(words[place : place + 2])
    if longer in TYPES:
        return longer
    return word if word in TYPES or _VECTOR.fullmatch(word) else ""
