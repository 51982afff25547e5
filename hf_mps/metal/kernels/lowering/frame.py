"""A function of LLVM assembly as basic blocks, and the frame of a simdgroup that divides it at places.

The frame has what a thread needs behind a place and made before it, for each of its 32 lanes. Within @step a value has
a home on the stack, filled from the frame behind each place, which LLVM turns into registers. A variable of the
kernel's own (alloca) that outlives a place lies in the frame itself. What is a few instructions on the kernel's
parameters is made anew at @step's beginning instead, and so is what the kernel's first block reads at the same constant
address for all threads.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

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
    """A function's text with its numbered values and blocks given names: numbers must follow one another, names not.

    Each switch comes to be on one line.
    """
    text = re.sub(r"(?<= \[)\n(?:    .*\n)*  (?=\])", lambda cases: f" {' '.join(cases[0].split())} ", text)
    return re.sub(r"(?m)(^|%)(?=\d+\b)", r"\1v", text)


def blocks(body: Iterable[str], first: str) -> list[Block]:
    """The blocks of a function's lines; `first` is the first one's label where it has none."""
    found: list[Block] = []
    for line in body:
        if label := _LABEL.match(line):
            found.append(Block(label[1]))
        elif line.strip():
            if not found:
                found.append(Block(first))
            found[-1].lines.append(line)
    return found


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


def split(given: str) -> list[str]:
    """The parts of a list of arguments: split at commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(given):
        depth += letter in "(<[{"
        depth -= letter in ")>]}"
        if letter == "," and depth == 0:
            parts.append(given[start:at].strip())
            start = at + 1
    return [*parts, given[start:].strip()] if given.strip() else []


_TYPE = re.compile(r"(<[^>]*>|\[[^\]]*\]|ptr(?: addrspace\(\d+\))?|[a-z]\w*)")
_NOTES = re.compile(
    r"^(?:(?:noundef|signext|zeroext|nonnull|nocapture|readonly|writeonly|captures\([^)]*\)|align \d+) )*"
)


def typed(argument: str) -> tuple[str, str]:
    """The type and the value of an argument, without the notes between them."""
    kind = _TYPE.match(argument)
    assert kind is not None, argument
    return kind.group(1), _NOTES.sub("", argument[kind.end() :].strip())


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


AGAIN = 12
"""Instructions beyond which a value is kept and not made anew."""

_PURE = re.compile(
    r"^  %\S+ = (?:getelementptr|zext|sext|trunc|add|sub|mul|and|or|xor|shl|lshr|ashr|icmp|select|addrspacecast|bitcast"
    r"|extractelement|insertelement|shufflevector) "
)
_CONSTANT = re.compile(r"^  %\S+ = load [^,]+, ptr addrspace\(2\) ")
_ALLOCA = re.compile(r"^  %\S+ = alloca (.+?)(?:, align (\d+))?$")
_DERIVED = re.compile(r"^  %\S+ = (?:getelementptr|addrspacecast|bitcast|phi|select|freeze) ")
_ADDRESS_KEPT = re.compile(r"^  (?:store|%\S+ = (?:insertvalue .*,|ptrtoint)) ptr(?: addrspace\(\d+\))? (%[\w.$-]+)\b")


@dataclass
class Frame:
    """The frame's type, the lines of @step's beginning, and which values have homes."""

    type: str
    beginning: list[str] = field(default_factory=list)
    homes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Of each value that is kept its type and its number in the frame."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """Of the blocks that end at a place what goes from homes to the frame there: what may be new since the last one."""
    taken: dict[str, list[str]] = field(default_factory=dict)
    """Of the blocks behind a place what comes from the frame: what is needed, or left, before the next one."""
    moved: set[str] = field(default_factory=set)
    """Values and variables that @step's beginning makes."""

    def body(self, function: list[Block]) -> list[str]:
        """The lines of the function's blocks, homes written and read where their values were."""
        ends: dict[str, list[str]] = {}
        bodies = [(block, self._lines(block, ends)) for block in function]
        lines = []
        for block, own in bodies:
            lines += [f"{block.label}:", *own[:-1], *ends.get(block.label, ()), own[-1]]
        return lines

    def _lines(self, block: Block, ends: dict[str, list[str]]) -> list[str]:
        lines: list[str] = []
        made: list[str] = []
        if block.label.startswith("hf.after."):
            lines += self._between(block.label, self.taken, "frame", "home")
        for at, line in enumerate(block.lines):
            name = assigned(line)
            if name in self.moved:
                continue
            comes = incoming(line)
            if comes is None:
                lines, made = lines + made, []
            place = f"{block.label}.{at}"
            line = self._read(line, place, lines) if comes is None else self._phi(line, comes, place, ends)
            if block.after and at == len(block.lines) - 1:
                lines += self._between(block.label, self.left, "home", "frame")
            lines.append(line)
            if name in self.homes:
                made.append(f"  store {self.homes[name][0]} {name}, ptr {_home(name)}")
        return lines

    def _read(self, line: str, place: str, lines: list[str]) -> str:
        """A line with what is kept read from its home before it."""
        for number, name in enumerate(dict.fromkeys(used(line))):
            if name in self.homes:
                value = f"%hf.use.{place}.{number}"
                lines.append(f"  {value} = load {self.homes[name][0]}, ptr {_home(name)}")
                first, sign, rest = line.partition(" = ") if assigned(line) else ("", "", line)
                line = first + sign + re.sub(re.escape(name) + r"(?![\w.$-])", value, rest)
        return line

    def _phi(self, line: str, comes: list[tuple[str, str]], at: str, ends: dict[str, list[str]]) -> str:
        for number, (name, label) in enumerate(comes):
            if name in self.homes:
                value = f"%hf.end.{at}.{number}"
                ends.setdefault(label, []).append(f"  {value} = load {self.homes[name][0]}, ptr {_home(name)}")
                line = line.replace(f"[ {name}, %{label} ]", f"[ {value}, %{label} ]")
        return line

    def _between(self, label: str, names: dict[str, list[str]], source: str, target: str) -> list[str]:
        """Copies from homes to the frame or back."""
        lines = []
        for name in names[label]:
            kind, number = self.homes[name]
            value, places = f"%hf.{source}.{label}.{number}", {"home": _home(name), "frame": f"%hf.slot.{number}"}
            lines += [f"  {value} = load {kind}, ptr {places[source]}", f"  store {kind} {value}, ptr {places[target]}"]
        return lines


def _home(name: str) -> str:
    return f"%hf.home.{name[1:]}"


def kept(function: list[Block], types: dict[str, str], uniform: Container[str]) -> Frame:
    """The frame of a function divided at its places. `uniform` has the parameters that all threads of a group share."""
    flow = Flow(function)
    living = flow.alive()
    divided = {block.label: block.after for block in function if block.after}
    crossing = set(flow.names(reduce(or_, (living[after] for after in divided.values()), 0)))
    variables = {
        assigned(line) or "": found for block in function for line in block.lines if (found := _ALLOCA.match(line))
    }
    outliving = _outliving(function, set(variables), crossing)
    again = _again(function, crossing - variables.keys(), variables.keys(), uniform)
    new = flow.new()
    left = {label: living[after] & new[label] for label, after in divided.items()}
    taken = flow.alive(left)
    frame = Frame("", moved={*variables, *again})
    kinds: list[str] = []
    slots: list[str] = []
    for name, found in variables.items():
        if name in outliving:
            slots.append(
                f"  {name} = getelementptr %hf.frame.type, ptr %hf.frame, i64 0, i32 {len(kinds)}, i64 %hf.lane.w"
            )
            # The type's own alignment may be below the variable's, which an empty array of as wide vectors brings.
            kinds.append(f"[32 x {{ [0 x <{found[2] or 1} x i8>], {found[1]} }}]")
        else:
            slots.append(found.string)
    for name in sorted(crossing - variables.keys() - again.keys()):
        at = len(kinds)
        frame.homes[name] = types[name], at
        slots.append(f"  %hf.slot.{at} = getelementptr %hf.frame.type, ptr %hf.frame, i64 0, i32 {at}, i64 %hf.lane.w")
        slots.append(f"  {_home(name)} = alloca {types[name]}")
        kinds.append(f"[32 x {types[name]}]")
    homes = flow.bits(frame.homes)
    frame.left = {label: flow.names(bits & homes) for label, bits in left.items()}
    frame.taken = {label: flow.names(taken[label] & homes) for label in divided.values()}
    frame.beginning = [*slots, *again.values()]
    # 64 bytes: one simdgroup's frame follows the other's, and a variable in it may ask for as much.
    frame.type = "%hf.frame.type = type { " + ", ".join([*kinds, "[0 x <64 x i8>]"]) + " }"
    return frame


def _outliving(function: list[Block], variables: set[str], crossing: set[str]) -> set[str]:
    """The variables whose address, or one inside of them, is used behind a place."""
    if not variables:
        return set()
    lines = [line for block in function for line in block.lines]
    of: dict[str, set[str]] = {name: {name} for name in variables}
    changed, found = True, set()
    while changed:
        changed = False
        for line in lines:
            if not _DERIVED.match(line):
                continue
            name = assigned(line) or ""
            sources = [value for value, _ in incoming(line) or ()] or used(line)
            reached = set().union(*(of.get(each, set()) for each in sources))
            if not reached <= of.get(name, set()):
                of.setdefault(name, set()).update(reached)
                changed = True
    for name, reached in of.items():
        if name in crossing:
            found |= reached
    for line in lines:
        if (stored := _ADDRESS_KEPT.match(line)) and stored[1] in of:
            found |= of[stored[1]]
    return found


def _again(
    function: list[Block], crossing: set[str], variables: Container[str], uniform: Container[str]
) -> dict[str, str]:
    """The values that the beginning makes anew, with their lines, in an order in which they can be made."""
    made = {name: line for block in function for line in block.lines if (name := assigned(line))}
    first = {assigned(line) for line in function[0].lines}
    shared: dict[str, bool] = {}
    chains: dict[str, list[str] | None] = {}

    def chain(name: str, depth: int = 0) -> list[str] | None:
        """The values that make this one, itself the last; None where it cannot be made anew."""
        if name not in chains and depth < AGAIN:
            chains[name] = found_chain(name, depth + 1)
        return chains.get(name)

    def found_chain(name: str, depth: int) -> list[str] | None:
        line = made[name]
        reads = bool(_CONSTANT.match(line)) and name in first
        if not (reads or _PURE.match(line)):
            return None
        order: dict[str, None] = {}
        same = True
        for each in used(line):
            if each in made and each not in variables:
                part = chain(each, depth)
                if part is None:
                    return None
                order |= dict.fromkeys(part)
                same &= shared[each]
            elif each not in variables:
                same &= each in uniform
            else:
                same = False
        if len(order) >= AGAIN or (reads and not same):
            return None
        shared[name] = same
        return [*order, name]

    found: dict[str, str] = {}
    for name in sorted(crossing):
        for each in chain(name) or ():
            found.setdefault(each, made[each])
    return found
