"""A function of LLVM assembly as basic blocks: which follow one another, and which values each of them finds alive."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_LABEL = re.compile(r"^([\w.$-]+):")
_TARGET = re.compile(r"label %([\w.$-]+)")
_PHI = re.compile(r"^  (%[\w.$-]+) = phi ")
_INCOMING = re.compile(r"\[ ([^,\]]+), %([\w.$-]+) \]")
_ASSIGNED = re.compile(r"^  (%[\w.$-]+) = ")
VALUE = re.compile(r"%[\w.$-]+")


@dataclass
class Block:
    """A label and the lines below it, the last one its terminator; `after` follows where threads wait at its end."""

    label: str
    lines: list[str] = field(default_factory=list)
    after: str | None = None

    @property
    def following(self) -> list[str]:
        """The labels of the blocks that may come next."""
        return [self.after] if self.after else _TARGET.findall(self.lines[-1])


def named(text: str) -> str:
    """A function's text with its numbered values and blocks given names: numbers must follow one another, names not."""
    return re.sub(r"(?m)(^|%)(?=\d+\b)", r"\1v", text)


def blocks(body: Iterable[str], first: str) -> list[Block]:
    """The blocks of a function's lines, each switch on one line; `first` is the first one's label where it has none."""
    found: list[Block] = []
    cases: list[str] | None = None
    for line in body:
        if cases is not None:
            cases.append(line.strip())
            if line == "  ]":
                found[-1].lines.append(" ".join(cases))
                cases = None
        elif label := _LABEL.match(line):
            found.append(Block(label[1]))
        elif line.strip():
            if not found:
                found.append(Block(first))
            if line.startswith("  switch ") and not line.endswith("]"):
                cases = [line]
            else:
                found[-1].lines.append(line)
    return found


def lines(function: Iterable[Block]) -> list[str]:
    """The lines of a function's blocks."""
    return [line for block in function for line in (f"{block.label}:", *block.lines)]


def assigned(line: str) -> str | None:
    """The value that a line gives a name to."""
    found = _ASSIGNED.match(line)
    return found[1] if found else None


def incoming(line: str) -> list[tuple[str, str]] | None:
    """Of a phi the values and the labels that they come from; None for another line."""
    return _INCOMING.findall(line) if _PHI.match(line) else None


def used(line: str) -> list[str]:
    """The names that a line uses; of a phi none, whose values are used where they come from."""
    if _PHI.match(line):
        return []
    return VALUE.findall(line.split(" = ", 1)[1] if _ASSIGNED.match(line) else line)


class Flow:
    """Which values are alive and which are new where: for each block a set of the function's values, as bits."""

    def __init__(self, function: list[Block]) -> None:
        self._function = function
        made = (name for block in function for line in block.lines if (name := assigned(line)))
        self._number = {name: 1 << at for at, name in enumerate(dict.fromkeys(made))}
        self._names = list(self._number)
        self._needs, self._makes = {}, {}
        self._ends = dict.fromkeys((block.label for block in function), 0)
        for block in function:
            own, before = 0, 0
            for line in block.lines:
                for name in used(line):
                    before |= self._number.get(name, 0) & ~own
                own |= self._number.get(assigned(line) or "", 0)
                for value, label in incoming(line) or ():
                    self._ends[label] |= self._number.get(value, 0)
            self._needs[block.label], self._makes[block.label] = before, own

    def alive(self, left: dict[str, int] | None = None) -> dict[str, int]:
        """The values that were made before a block's beginning and are used in it or after it.

        With `left`, of the blocks that end at a place what is left there, nothing behind a place counts.
        """
        found = dict(self._needs)
        ends = {label: bits | (left or {}).get(label, 0) for label, bits in self._ends.items()}
        changed = True
        while changed:
            changed = False
            for block in reversed(self._function):
                label, out = block.label, ends[block.label]
                for following in block.following if left is None or not block.after else ():
                    out |= found.get(following, 0)
                bits = self._needs[label] | (out & ~self._makes[label])
                if bits != found[label]:
                    found[label], changed = bits, True
        return found

    def new(self) -> dict[str, int]:
        """The values that may have been made since the last place, at each block's end."""
        found = dict(self._makes)
        changed = True
        while changed:
            changed = False
            for block in self._function:
                for following in () if block.after else block.following:
                    if following in found and found[following] | found[block.label] != found[following]:
                        found[following] |= found[block.label]
                        changed = True
        return found

    def bits(self, names: Iterable[str]) -> int:
        """A set of values as bits."""
        return sum(self._number[name] for name in names)

    def names(self, bits: int) -> list[str]:
        """The values of a set."""
        found = []
        while bits:
            last = bits & -bits
            found.append(self._names[last.bit_length() - 1])
            bits ^= last
        return found
