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
    """The blocks of a function's lines, comments left out and each switch on one line; `first` where no label begins."""
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


def alive(function: list[Block]) -> dict[str, set[str]]:
    """For each block the values that were made before it and are used in it or after it."""
    made = {name for block in function for line in block.lines if (name := assigned(line))}
    number = {name: 1 << at for at, name in enumerate(made)}
    needs, makes, ends = {}, {}, dict.fromkeys((block.label for block in function), 0)
    for block in function:
        own, before = 0, 0
        for line in block.lines:
            for name in used(line):
                before |= number.get(name, 0) & ~own
            own |= number.get(assigned(line) or "", 0)
            for value, label in incoming(line) or ():
                ends[label] |= number.get(value, 0)
        needs[block.label], makes[block.label] = before, own
    found = _settled(function, needs, makes, ends)
    names = list(number.items())
    return {label: {name for name, bit in names if bits & bit} for label, bits in found.items()}


def _settled(
    function: list[Block], needs: dict[str, int], makes: dict[str, int], ends: dict[str, int]
) -> dict[str, int]:
    """What is alive at each block's beginning, as bits; backwards until nothing changes."""
    found = dict(needs)
    changed = True
    while changed:
        changed = False
        for block in reversed(function):
            label = block.label
            out = ends[label]
            for following in block.following:
                out |= found.get(following, 0)
            bits = needs[label] | (out & ~makes[label])
            if bits != found[label]:
                found[label], changed = bits, True
    return found
