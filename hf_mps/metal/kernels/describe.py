"""What `hf-mps kernels list` and `show` print: releases, families of kernels by their names, a kernel's signature."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import aligned, memory
from hf_mps.metal.kernels import metallib, signature, store
from hf_mps.metal.kernels.metallib import Library
from hf_mps.metal.kernels.signature import Binding, Signature

# The element types of Metal as PyTorch's host code spells them, with the C and the Python spellings of some kernels.
_TYPE = re.compile(
    r"bool|u?(char|short|int|long)|double|half|(bfloat|float)(16)?|float32|u?int(8|16|32|64)_t|(bfloat|float|half)[234]"
)
LAYOUTS = frozenset(["broadcast", "cast", "castout", "dense", "ilp", "ilp4", "lhs", "rhs", "scalar", "strided"])

# 32, 64bit, u16 and i64 (the width of an index), tptg512, tg128, bq32 and the like (the tile), mask…, …Params.
_SIZE = re.compile(r"\d+|\d+bit|[iu](8|16|32|64)|(bq|tg|tptg)\d+|mask\w+|\w+Params")


class Family(NamedTuple):
    """Kernels that share the words before layout, types and sizes."""

    name: str
    kernels: int
    types: tuple[str, ...]
    """The element types in their names, the most frequent first."""


def family(kernel: str) -> str:
    """Return the words of a kernel's name before its layout, types and sizes: `rms_norm` of `rms_norm_float`."""
    words = kernel.split("_")
    for place, word in enumerate(words):
        if place and (word in LAYOUTS or _SIZE.fullmatch(word) or _type_at(words, place)):
            return "_".join(words[:place])
    return kernel


def types(kernel: str) -> list[str]:
    """Return the element types in a kernel's name, in its order; none where it has none."""
    words = kernel.split("_")
    return [found for place in range(1, len(words)) if (found := _type_at(words, place))]


def table(kernels: Iterable[str]) -> list[Family]:
    """Return the families of some kernels, by name."""
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
    """Return the element type that the words name from `place` on, or an empty string: int64_t is two words."""
    word, longer = words[place], "_".join(words[place : place + 2])
    if "_" in longer and _TYPE.fullmatch(longer):
        return longer
    return word if _TYPE.fullmatch(word) else ""


LONGEST = 24


def releases() -> list[dict[str, Any]]:
    """Return what is known of each fetched release, oldest first."""
    return [asdict(store.facts(release)) for release in store.releases()]


def release_lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """The fetched releases as a table: release, kernels, families, size, wheel."""
    for each in found:
        each |= {"kernels": f"{each['kernels']:,} kernels", "families": f"{each['families']:,} families"}
        each["size"] = memory(each["size"])
    rows = [tuple(each[name] for name in ("release", "kernels", "families", "size", "wheel")) for each in found]
    yield from aligned(rows, right=(1, 2, 3), widest=80)


def family_lines(found: list[Family]) -> Iterator[str]:
    """The families as a table: name, number of kernels, element types."""
    rows = [(each.name, str(each.kernels), " ".join(each.types) or "-") for each in found]
    yield from aligned(rows, right=(1,), widest=60)


def of_family(library: Library, name: str) -> list[str]:
    """The kernels of a family, in the library's order. Raises UserError, with the nearest name, for a wrong one."""
    found = [kernel for kernel in library if family(kernel) == name]
    if not found:
        known = {family(kernel) for kernel in library}
        raise UserError(f"there is no family {name}{nearest(name, known) or '; next: hf-mps kernels list'}")
    return found


def kernel(library: Library, name: str, release: str) -> dict[str, Any]:
    """All that a kernel's module says, in JSON's own types. Raises UserError without llvmlite or for a wrong name."""
    module = metallib.parse(library, name)
    text = str(module)
    known = signature.read(text, name)
    return {
        "kernel": name,
        "release": release,
        "family": family(name),
        "types": types(name),
        "bitcode": len(library[name]),
        "bindings": [_binding(each) for each in known.bindings],
        "attributes": [{"name": each.name, "type": each.type} for each in known.attributes],
        "largest_threadgroup": known.largest_group,
        "threadgroup_memory": [each._asdict() for each in metallib.shared(module)],
        "intrinsics": sorted(known.intrinsics),
        "compiled_with": metallib.compiled_with(text),
    }


def in_short(library: Library, name: str) -> tuple[str, str]:
    """Return a kernel's name, and its buffers by location, those that it writes with a star: `0 out* 1 input`."""
    known: Signature = signature.read(str(metallib.parse(library, name)), name)
    return name, " ".join(f"{each.location} {each.name}{'*' * each.writes}" for each in known.bindings)


def kernel_lines(known: dict[str, Any]) -> Iterator[str]:
    """A kernel's signature for a person: buffers by location with their structs, attributes, memory, intrinsics."""
    yield f"{known['kernel']}  {store.named(known['release'])}, family {known['family']}, {known['bitcode']:,} bytes"
    rows = [("location", "name", "address space", "access", "type", "bytes"), *_binding_rows(known["bindings"])]
    yield from aligned(rows, right=(0, 5))
    yield from (f"thread  {each['name']} ({each['type']})" for each in known["attributes"])
    for each in known["threadgroup_memory"]:
        yield f"threadgroup memory  {each['name']}: {each['size']:,} bytes, {each['type']}"
    yield f"largest threadgroup  {known['largest_threadgroup']} threads"
    yield f"intrinsics  {' '.join(known['intrinsics']) or 'none'}"
    yield f"compiled with  {' '.join(known['compiled_with']) or 'no options'}"


def _binding_rows(bindings: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for each in bindings:
        access = each["access"] if each["used"] else f"{each['access']}, unused"
        # A type that the compiler spelled out in C++, as the result of a functor, says nothing that its size does not.
        spelled = each["type"] if len(each["type"]) <= LONGEST else f"{each['type'][: LONGEST - 1]}…"
        size = f"{each['bytes']}" if each["fixed"] else f"{each['bytes']} each"
        yield str(each["location"]), each["name"], each["address_space"], access, spelled, size
        for member in each["members"]:
            spelled = member["type"] + (f"[{member['count']}]" if member["count"] else "")
            if member["location"] is not None:
                spelled += f", buffers from location {member['location']}"
            yield "", f"  +{member['offset']} {member['name']}", "", "", spelled, str(member["bytes"])


def _binding(each: Binding) -> dict[str, Any]:
    return {
        "location": each.location,
        "name": each.name,
        "address_space": signature.SPACES[each.space],
        "access": "read_write" if each.writes else "read",
        "type": each.type,
        # The whole buffer where the kernel fixes it, else one element; threadgroup memory is as large as the host says.
        "bytes": each.size if each.whole is None else each.whole,
        "fixed": each.whole is not None,
        "used": each.used,
        "indirect": each.indirect,
        "members": [
            {
                **{name: getattr(member, name) for name in ("name", "offset", "type", "count")},
                **{"bytes": member.size * max(1, member.count), "location": member.indirect},
            }
            for member in each.members
        ],
    }
