"""What a kernel works out first that is the same for all threads of a group, taken out to be done once for the group.

PyTorch's kernels for any strides begin with a loop over the dimensions that turns the group's number into an offset:
divisions that each of 32 or 1,024 lanes would repeat. The blocks in front that branch on shared values alone, make
nothing else, and all lead to one block become the function @shared; what that block and the later ones use of them
become parameters of the kernel. Shared are buffers' addresses, the group's position and the sizes, what constant
memory holds at a shared address (Metal lets nobody write it while a kernel runs), and what follows from those.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from hf_mps.metal.kernels.lowering.blocks import Block, assigned, incoming, used

_FOLLOWS = re.compile(
    r"^  %\S+ = (?:getelementptr|zext|sext|trunc|add|sub|mul|and|or|xor|shl|lshr|ashr|udiv|urem|sdiv|srem|icmp|fcmp"
    r"|fadd|fsub|fmul|fdiv|uitofp|sitofp|fptoui|fptosi|fpext|fptrunc|select|freeze|bitcast|phi|extractelement"
    r"|insertelement|load [^,]+, ptr addrspace\(2\)|(?:tail )?call [^@]*@llvm\.(?:umin|umax|smin|smax|abs)\.) ?"
)
_BRANCH = re.compile(r"^  (?:br|switch) ")
TRIED = 16
"""Blocks in front that are tried as the one where all meet."""


@dataclass(frozen=True)
class Shared:
    """The values that a group shares, by name with their types, and the text of @shared, which returns them."""

    values: dict[str, str]
    text: str

    @property
    def type(self) -> str:
        """What @shared returns."""
        return "{ " + ", ".join(self.values.values()) + " }"


def taken_out(function: list[Block], parameters: str, types: dict[str, str], uniform: Container[str]) -> Shared:
    """Take the shared beginning out of a function's blocks, which change; nothing where it is but one block."""
    same = _same(function, uniform)
    of = {block.label: block for block in function}
    for meeting in _candidates(function, of, same):
        inside = _inside(function[0], of, same, meeting)
        if inside is not None:
            return _out(function, parameters, types, same, inside, of[meeting])
    return Shared({}, "")


def _same(function: list[Block], uniform: Container[str]) -> set[str]:
    """The values that are shared where only shared values choose the way to them."""
    made = {name: line for block in function for line in block.lines if (name := assigned(line))}
    same = {name for name, line in made.items() if _FOLLOWS.match(line)}

    def holds(value: str) -> bool:
        return value in same if value in made else value in uniform

    changed = True
    while changed:
        left = {
            name
            for name in same
            if not all(
                holds(each) for each in [v for v, _ in incoming(made[name]) or () if v[0] == "%"] or used(made[name])
            )
        }
        same -= left
        changed = bool(left)
    return same


def _passes(block: Block, same: set[str], first: bool) -> bool:
    """Whether a block is made of shared values alone, the branch too; the first one may make others, which stay."""
    *lines, last = block.lines
    if not _BRANCH.match(last) or any(name not in same for name in used(last.split("label", 1)[0])):
        return False
    return first or all(assigned(line) in same for line in lines)


def _candidates(function: list[Block], of: dict[str, Block], same: set[str]) -> list[str]:
    """Blocks where the ways through the front may meet, the furthest first."""
    found: list[str] = []
    waiting = [function[0].label]
    while waiting and len(found) < TRIED:
        label = waiting.pop(0)
        if _passes(of[label], same, label == function[0].label):
            following = [each for each in dict.fromkeys(of[label].following) if each not in found]
            found += following
            waiting += following
    return found[::-1]


def _inside(first: Block, of: dict[str, Block], same: set[str], meeting: str) -> list[str] | None:
    """The blocks in front of a meeting, where all of them lead nowhere else."""
    inside, waiting = [first.label], [first.label]
    while waiting:
        block = of[waiting.pop()]
        if not _passes(block, same, block is first):
            return None
        following = [each for each in dict.fromkeys(block.following) if each not in inside and each != meeting]
        inside += following
        waiting += following
    leading = {label for label, block in of.items() if not set(block.following).isdisjoint({*inside, meeting})}
    phis = [assigned(line) for line in of[meeting].lines if incoming(line) is not None]
    return inside if len(inside) > 1 and leading <= set(inside) and same.issuperset(phis) else None


def _out(
    function: list[Block], parameters: str, types: dict[str, str], same: set[str], inside: list[str], meeting: Block
) -> Shared:
    first = function[0]
    front = [block for block in function if block.label in inside]
    phis = [line for line in meeting.lines if incoming(line) is not None]
    rest = [block for block in function if block.label not in inside]
    meeting.lines = meeting.lines[len(phis) :]
    needed = {name for block in rest for line in block.lines for name in used(line)}
    needed |= {value for block in rest for line in block.lines for value, _ in incoming(line) or ()}
    made = [name for block in front[1:] for line in block.lines if (name := assigned(line)) in needed]
    values = {name: types[name] for name in [*filter(None, map(assigned, phis)), *filter(None, made)]}
    kind = "{ " + ", ".join(values.values()) + " }"
    lines = [f"define internal {kind} @shared({parameters}) nounwind {{"]
    for block in front:
        kept = [line for line in block.lines if _BRANCH.match(line) or assigned(line) in same]
        lines += [f"{block.label}:", *kept]
    lines += [f"{meeting.label}:", *phis]
    whole = "poison"
    for at, (name, each) in enumerate(values.items()):
        lines.append(f"  %hf.with.{at} = insertvalue {kind} {whole}, {each} {name}, {at}")
        whole = f"%hf.with.{at}"
    lines += [f"  ret {kind} {whole}", "}", ""]
    first.lines[-1] = f"  br label %{meeting.label}"
    function[:] = [first, *rest]
    return Shared(values, "\n".join(lines))
