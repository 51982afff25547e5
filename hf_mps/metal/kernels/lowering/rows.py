"""The loop over a row of threads, x, and how it is freed of the question that a kernel asks of each thread first.

Most of PyTorch's kernels begin with a bound: `if (index >= numel) return`, or, with four elements a thread, a loop over
the rest where four are too many. Inside the row's loop that keeps LLVM from making vectors. `question` takes it out of
the kernel as a function, and `guarded` asks it of the row's threads beforehand: those in front that all give the
ordinary answer run in a loop of their own, in which LLVM knows the answer; the others run as they are. It is asked
anew for each row and no relation of buffers and grid is taken for granted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hf_mps.metal.kernels.lowering import assembly
from hf_mps.metal.kernels.lowering.frame import split, typed

LONGEST = 800
"""Lines of a kernel beyond which a second copy of it costs more time in compilation than it saves."""

_PURE = re.compile(
    r"^  %\d+ = (?:shl|lshr|ashr|add|sub|mul|and|or|xor|zext|sext|trunc|icmp|extractelement|select|alloca) [^!]*$"
    r"|^  %\d+ = (?:tail )?call [^!]*@llvm\.(?:umin|umax|smin|smax)\.[^!]*$"
)
_LOAD = re.compile(r"^  %\d+ = load i\d+, ptr addrspace\(2\) %(\d+),")
_BRANCH = re.compile(r"^  br i1 (%\d+), label ")
# The answer of a thread inside the bounds, by how the comparison is written.
_ORDINARY = {"ugt": "false", "uge": "false", "sgt": "false", "sge": "false"} | dict.fromkeys(
    ("ult", "ule", "slt", "sle"), "true"
)


Loop = Callable[[str, str], str]
"""What writes a row's loop: `loop(values, call)`, where `values` makes a thread's values of %lidx, `call` runs it."""


class Row(NamedTuple):
    """How the threads of a row run, and the functions that a module needs for it beside @kernel."""

    loop: Loop
    text: str = ""


def of(kernel: str, dimensions: int | None) -> Row:
    """The best way for a kernel, whose parameter `dimensions`, if any, points to the number of dimensions."""
    if dimensions is not None and (own := versions(kernel, dimensions)):
        return Row(partial(versioned, parameter=dimensions), own)
    asked = question(kernel)
    return Row(plain) if asked is None else Row(partial(guarded, ordinary=asked.ordinary), asked.text + DECLARED)


@dataclass(frozen=True)
class Question:
    """A function `i1 @question(parameters of the kernel)`, and the answer of an ordinary thread: "true" or "false"."""

    text: str
    ordinary: str


def question(kernel: str) -> Question | None:
    """The comparison that ends the kernel's first block, where that needs values and the thread's position alone.

    `kernel` is the module's text with the kernel as @kernel. None where the first block ends otherwise, reads what
    another thread may write, or where the kernel is longer than LONGEST.
    """
    found = re.search(r"^define [^\n]*@kernel\((.*)\)[^\n]*\{\n(.*?)^\}$", kernel, re.MULTILINE | re.DOTALL)
    if found is None or found[2].count("\n") > LONGEST:
        return None
    parameters = split(found[1])
    lines: list[str] = []
    for line in found[2].splitlines():
        if branch := _BRANCH.match(line):
            return _question(parameters, lines, branch[1])
        line = re.sub(r", !.*", "", line)
        load = _LOAD.match(line)
        if not _PURE.match(line) and not (load and int(load[1]) < len(parameters)):
            return None
        lines.append(line)
    return None


def _question(parameters: list[str], lines: list[str], asked: str) -> Question | None:
    compared = next(
        (found for line in lines if (found := re.match(rf"  {asked} = icmp (?:samesign )?(\w+) ", line))), None
    )
    ordinary = _ORDINARY.get(compared[1]) if compared else None
    if ordinary is None:
        return None
    kept = [line for line in lines if " = alloca " not in line]
    given = ", ".join(f"{typed(each)[0]} {each.rsplit(' ', 1)[1]}" for each in parameters)
    text = f"define internal i1 @question({given}) alwaysinline nounwind {{\n" + "\n".join(
        [*kept, f"  ret i1 {asked}", "}\n"]
    )
    # The names of a function's unnamed values must follow one another; these do not any more.
    return Question(re.sub(r"%(\d+)\b", r"%v\1", text), ordinary)


DIMENSIONS = (2, 3, 4)
"""Numbers of dimensions for which a kernel for any strides has its own version."""
SHORT = 200
"""Lines of a kernel beyond which versions cost more time in compilation than they save."""


def versions(kernel: str, parameter: int) -> str:
    """The functions @kernel.2, … of a kernel that reads its number of dimensions from a parameter's memory, or "".

    Where LLVM knows the number it unrolls the loops over dimensions, keeps the indices in registers and works out once
    for a row what only the first dimension changes: a strided copy then takes a fifth of the time.
    """
    found = re.search(r"^define [^\n]*@kernel\(.*?^\}$", kernel, re.MULTILINE | re.DOTALL)
    read = re.compile(rf"load i32, ptr addrspace\(2\) %{parameter}, [^\n]*")
    if found is None or found[0].count("\n") > SHORT or not read.search(found[0]):
        return ""
    return "".join(
        read.sub(f"add i32 {number}, 0", found[0]).replace("@kernel(", f"@kernel.{number}(") + "\n"
        for number in DIMENSIONS
    )


def versioned(values: str, call: str, parameter: int) -> str:
    """The row's threads one after the other, by the version for the number of dimensions where there is one."""
    cases = " ".join(f"i32 {number}, label %for.{number}.x" for number in DIMENSIONS)
    lines = [f"  %dimensions = load i32, ptr addrspace(2) %arg{parameter}"]
    lines += [f"  switch i32 %dimensions, label %x [ {cases} ]"]
    for number in DIMENSIONS:
        own = call.replace("@kernel(", f"@kernel.{number}(")
        lines.append(renamed(_loop(f"for.{number}.x", "y", ("0", "%sizex"), "y.end", values, own), f"for.{number}"))
    return "\n".join([*lines, _loop("x", "y", ("0", "%sizex"), "y.end", values, call)])


def plain(values: str, call: str) -> str:
    """The row's threads one after the other."""
    return f"  br label %x\n{_loop('x', 'y', ('0', '%sizex'), 'y.end', values, call)}"


def guarded(values: str, call: str, ordinary: str) -> str:
    """The row with the question asked beforehand, as the module's docstring says; `ordinary` is a Question's."""
    asked = call.replace("call void @kernel(", "%answer = call i1 @question(")
    asked += f"\n  %odd = xor i1 %answer, {ordinary}\n  %even = xor i1 %odd, true"
    scan = _loop("scan", "y", ("0", "%sizex"), "scanned", _CARRIED + values, asked + _COUNTED)
    sure = f"{asked}\n  call void @llvm.assume(i1 %even)\n{call}"
    clear = _loop("clear", "scanned", ("0", "%clear.size"), "others", values, sure)
    others = _loop("x", "others", ("%clear.size", "%sizex"), "y.end", values, call)
    return assembly("guarded.ll", scan=renamed(scan, "scan"), clear=renamed(clear, "clear"), others=others)


_CARRIED = """  %count = phi i32 [ 0, %y ], [ %count.next, %scan ]
  %last = phi i32 [ 0, %y ], [ %last.next, %scan ]
"""
_COUNTED = """
  %one = zext i1 %even to i32
  %count.next = add i32 %count, %one
  %place = add nuw i32 %lidx, 1
  %reached = select i1 %even, i32 %place, i32 0
  %last.next = call i32 @llvm.umax.i32(i32 %last, i32 %reached)"""
DECLARED = "declare i32 @llvm.umax.i32(i32, i32)\ndeclare void @llvm.assume(i1)\n"


def _loop(label: str, before: str, bounds: tuple[str, str], after: str, values: str, body: str) -> str:
    """A loop over %lidx from the first of `bounds` to the second, not included, which is not empty."""
    return f"""{label}:
  %lidx = phi i32 [ {bounds[0]}, %{before} ], [ %lidx.next, %{label} ]
{values}
{body}
  %lidx.next = add nuw nsw i32 %lidx, 1
  %x.more = icmp ult i32 %lidx.next, {bounds[1]}
  br i1 %x.more, label %{label}, label %{after}"""


def renamed(loop: str, prefix: str) -> str:
    """The loop with its own values' names prefixed, so that it may stand beside its likes."""
    own = set(re.findall(r"^\s*(%[\w.]+) =", loop, re.MULTILINE))
    return re.sub(r"%[\w.]+", lambda name: f"%{prefix}.{name[0][1:]}" if name[0] in own else name[0], loop)
