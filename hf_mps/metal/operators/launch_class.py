"""What an operator's call launches on a Mac: a Metal kernel, an MPSGraph, Apple's own kernel, a copy, or nothing.

`launch_classes.json` holds what scripts/tools/launch_classes.py read from the code of each release's macOS wheel
(launch_class_reader.py beside it). Where the host has several ways, `launch_rules` decides by dtype, shape and layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from packaging.version import InvalidVersion, Version

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, brief
from hf_mps.metal.operators.dispatcher import MADE_OF_OTHERS

LaunchClass = Literal["metal", "graph", "framework", "blit", "mixed", "cpu", "view", "unknown"]
CLASSES: dict[LaunchClass, str] = {
    "metal": "PyTorch's own Metal kernel",
    "graph": "an MPSGraph, compiled once for each shape",
    "framework": "a kernel of Apple's Metal Performance Shaders",
    "blit": "a copy, which no kernel makes",
    "mixed": "the host decides between several of these",
    "cpu": "no Metal kernel: the CPU runs it",
    "view": "nothing: a view, or memory alone",
    "unknown": "another library's operator, or none of that release",
}
LAUNCHED: tuple[LaunchClass, ...] = ("metal", "graph", "framework", "mixed")
"""The classes that compute on the GPU; a blit copies there."""
FACTS = Path(__file__).with_name("launch_classes.json")
ABSENT = "-"


@dataclass(frozen=True)
class Operand:
    """A tensor of a call: `dtype` as in "float32", `device` as in "mps"; `dense` is whether it is contiguous."""

    dtype: str
    shape: tuple[int, ...]
    dense: bool = True
    device: str = "mps"


@dataclass(frozen=True)
class Call:
    """One call of an operator ("aten::add.Tensor").

    `arguments` are its positional ones, as far as they were given: a whole number, a bool, a tuple of those, or None in
    place of anything else. `lists` are the lengths of the lists of tensors among them, whose tensors are in `inputs`.
    """

    operator: str
    inputs: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    arguments: tuple[int | tuple[int, ...] | None, ...] = ()
    lists: tuple[int, ...] = ()

    @property
    def base(self) -> str:
        """The operator's name without namespace and overload, and without an in-place form's underscore."""
        name = self.operator.partition("::")[2].partition(".")[0]
        return name.rstrip("_") or name

    @property
    def graph(self) -> tuple[object, ...]:
        """What one compiled graph serves: the operator with its inputs' dtypes and shapes."""
        return (self.operator, *((each.dtype, each.shape) for each in self.inputs))


class LaunchTable:
    """The launch classes of one release. `operators`: "aten::mm" to "metal", or to several as "graph+metal"."""

    def __init__(self, release: str, operators: Mapping[str, str], *, macos: tuple[int, int] = (15, 0)) -> None:
        self.release, self._operators, self.macos = release, operators, macos

    def ways(self, operator: str) -> tuple[str, ...]:
        """Every class that an operator's calls may have; empty where the release has no such operator."""
        return tuple(filter(None, self._found(operator).split("+")))

    def names(self) -> set[str]:
        """The operators that the table lists, of some releases without those overloads that are as the others."""
        return set(self._operators)

    def of(self, call: Call) -> Choice[LaunchClass]:
        """The class of a call, and why."""
        from hf_mps.metal.operators.launch_rules import decided

        ways = self.ways(call.operator)
        if call.operator in MADE_OF_OTHERS:
            return Choice("mixed", "made of other operators")
        if not ways:
            return Choice("unknown", CLASSES["unknown"])
        ruled = decided(call, ways, Version(self.release), self.macos)
        if ruled is not None:
            return ruled
        if len(ways) > 1:
            return Choice("mixed", f"the host decides: {', '.join(ways)}")
        only: LaunchClass = ways[0]  # type: ignore[assignment]
        return Choice(only, CLASSES[only])

    def encoded(self, call: Call) -> tuple[LaunchClass, ...]:
        """The class of each dispatch, graph and blit that the host encodes for a call, in order; empty for a view."""
        from hf_mps.metal.operators.dispatches import encoded

        return encoded(call, self)

    def _found(self, operator: str) -> str:
        return self._operators.get(operator, "")


class _Compact(LaunchTable):
    """A column of `launch_classes.json`, whose names stand for all overloads that have no line of their own."""

    def names(self) -> set[str]:
        return {f"aten::{name.rstrip('.')}" for name in self._operators}

    def _found(self, operator: str) -> str:
        namespace, _, name = operator.partition("::")
        if namespace != "aten":
            return ""
        base, _, overload = name.partition(".")
        for key in (f"{base}.{overload}", base):
            if key in self._operators:
                return self._operators[key].replace(ABSENT, "")
        return ""


def known() -> tuple[str, ...]:
    """The releases in the table, oldest first."""
    return tuple(_facts()["releases"])


def table(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable | None:
    """The classes of a release in the table ("2.13.0", or "2.13.0+cpu"), None for another.

    `macos` is the system that its host asks for in places.
    """
    try:
        version = Version(release)
    except InvalidVersion:
        return None
    name = ".".join(map(str, (*version.release, 0, 0)[:3]))
    if name not in known() or version.pre or version.dev:
        return None
    return _Compact(name, _column(name), macos=macos)


def of_release(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable:
    """The classes of a release in the table. Raises UserError, with the releases that are in it, for another."""
    found = table(release, macos=macos)
    if found is None:
        raise UserError(
            f"what torch {brief(release)} launches on a Mac is not known; known: {', '.join(known())}; next: in a "
            "checkout of hf_mps, python scripts/tools/launch_classes.py WHEEL"
        )
    return found


def nearest(release: str, *, macos: tuple[int, int] = (15, 0)) -> LaunchTable:
    """The classes of the newest release in the table that is no newer than `release`, or of the oldest."""
    name = [known()[0], *(each for each in known() if Version(each).release <= Version(release).release)][-1]
    return _Compact(name, _column(name), macos=macos)


@lru_cache(maxsize=1)
def _facts() -> dict[str, dict[str, str]]:
    content: dict[str, dict[str, str]] = json.loads(FACTS.read_text(encoding="utf-8"))
    return content


@lru_cache(maxsize=8)
def _column(release: str) -> dict[str, str]:
    place = known().index(release)
    return {name: classes.split()[place] for classes, names in _facts()["classes"].items() for name in names.split()}
