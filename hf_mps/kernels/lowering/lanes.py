"""A kernel's threads as LLVM coroutines: each call that needs other lanes is a place where a thread is suspended.

LLVM splits the function there (passes CoroSplit and others of its default pipeline) and keeps what lives across in a
frame, so that a thread costs a few hundred bytes and a resumption is a call. A suspended thread leaves the number of
the place in its state and the call's arguments in its slot; the operation's result waits in the other slot.
Source of the intrinsics: LLVM's "Coroutines in LLVM", switched-resume lowering.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_mps.core.errors import RunError
from hf_mps.kernels import intrinsics
from hf_mps.kernels.lowering import entry
from hf_mps.kernels.lowering.flatten import Flat

_CALL = re.compile(
    r"^  (?:(%\S+) = )?(?:(?:tail|notail) )?call (?:[a-z]+ )*?(\S.*?) @(air\.[\w.]+)\((.*)\)(?: #\d+)?(?:, !.*)?$"
)
_LABEL = re.compile(r"^([\w.$-]+|\"[^\"]*\"):")

_PRELUDE = """  %hf.id = call token @llvm.coro.id(i32 64, ptr null, ptr null, ptr null)
  %hf.frame = load ptr, ptr %hf.top
  %hf.size = call i64 @llvm.coro.size.i64()
  %hf.size.more = add i64 %hf.size, 63
  %hf.size.up = and i64 %hf.size.more, -64
  %hf.top.next = getelementptr i8, ptr %hf.frame, i64 %hf.size.up
  store ptr %hf.top.next, ptr %hf.top
  %hf.handle = call noalias ptr @llvm.coro.begin(token %hf.id, ptr %hf.frame)
  %hf.lane.w = zext i32 %hf.lane to i64"""
_POSTLUDE = f"""hf.done:
  store i32 {entry.DONE - (1 << 32)}, ptr %hf.state
  %hf.last = call i8 @llvm.coro.suspend(token none, i1 true)
  switch i8 %hf.last, label %hf.suspended [ i8 0, label %hf.never i8 1, label %hf.suspended ]
hf.never:
  unreachable
hf.suspended:
  call void @llvm.coro.end(ptr %hf.handle, i1 false, token none)
  ret ptr %hf.handle"""
_DECLARED = """declare token @llvm.coro.id(i32, ptr readnone, ptr nocapture readonly, ptr)
declare i64 @llvm.coro.size.i64()
declare ptr @llvm.coro.begin(token, ptr writeonly)
declare i8 @llvm.coro.suspend(token, i1)
declare void @llvm.coro.end(ptr, i1, token)
"""


@dataclass(frozen=True)
class Place:
    """A cross-lane call that threads wait at: its number, the intrinsic, its arguments' types, its result's type."""

    number: int
    name: str
    given: tuple[str, ...]
    result: str


def suspended(flat: Flat) -> str:
    """The module with @kernel made the coroutine @thread, and @operation, which runs a simdgroup's call of a number."""
    start = flat.text.index("define dso_local void @kernel(")
    end = flat.text.index("\n}\n", start)
    thread, places = _thread(flat.text[start:end].splitlines())
    rest = flat.text[:start] + flat.text[end + len("\n}\n") :]
    rest = re.sub(r"^declare .*@(air\.|hf\.)[^\n]*\n", "", rest, flags=re.M)
    return rest + thread + "\n}\n" + _DECLARED + _operation(places)


def _thread(lines: list[str]) -> tuple[str, list[Place]]:
    head, body = lines[0], lines[1:]
    context = "ptr %hf.top, ptr %hf.state, ptr %hf.given, ptr %hf.results, i32 %hf.lane, ptr addrspace(3) %hf.shared"
    given = head.split("@kernel(", 1)[1]
    parameters, attributes = given.rsplit(")", 1)[0], given.rsplit(")", 1)[1]
    written = [f"define internal ptr @thread({context}, {parameters}){attributes.replace('{', 'presplitcoroutine {')}"]
    # The first block has no label of its own: its number follows those of the parameters.
    unnamed = [each for each in _split(parameters) if re.search(r"%\d+$", each)]
    block, begun = str(len(unnamed)), False
    places: list[Place] = []
    last: dict[str, str] = {}
    for line in body:
        label = _LABEL.match(line)
        block = label.group(1) if label else block
        if not begun and not label and " = alloca " not in line:
            written.append(_PRELUDE)
            begun = True
        call = _CALL.match(line)
        if call and intrinsics.kind(call.group(3)) != "lane":
            places.append(_place(call, len(places) + 1))
            written.append(_suspension(call, places[-1]))
            last[block] = f"hf.after.{places[-1].number}"
        else:
            written.append(own(line))
    text = "\n".join([*written, _POSTLUDE])
    return re.sub(r", %(\S+) \]", lambda match: f", %{last.get(match.group(1), match.group(1))} ]", text), places


def own(line: str, lane: str = "%hf.lane", shared: str = "%hf.shared") -> str:
    """A line of a kernel with our own calls replaced by what the thread was given, and its return by its last place."""
    line = re.sub(r"(?:tail )?call i32 @hf\.lane\(\)(?: #\d+)?", f"add i32 {lane}, 0", line)
    line = re.sub(
        r"(?:tail )?call ptr addrspace\(3\) @hf\.threadgroup\(i64 (\d+)\)(?: #\d+)?",
        rf"getelementptr i8, ptr addrspace(3) {shared}, i64 \1",
        line,
    )
    return "  br label %hf.done" if line.strip() == "ret void" else line


def _place(call: re.Match[str], number: int) -> Place:
    _, result, name, given = call.groups()
    types = tuple(_typed(each)[0] for each in _split(given))
    return Place(number, name, types, result.split(")")[-1].strip() if result.startswith("(") else result)


def _suspension(call: re.Match[str], place: Place) -> str:
    """Leave the arguments in the slot, say where this thread stands, wait, and take the result."""
    assigned, _, _, given = call.groups()
    at, state, lines = place.number, place.number, []
    if intrinsics.kind(place.name) == "barrier":
        state = entry.BARRIER
    elif place.given:
        struct = "{ " + ", ".join(place.given) + " }"
        for field, each in enumerate(_split(given)):
            kind, value = _typed(each)
            slot = f"%hf.given.{at}.{field}"
            lines.append(f"  {slot} = getelementptr {struct}, ptr %hf.given, i64 %hf.lane.w, i32 {field}")
            lines.append(f"  store {kind} {value}, ptr {slot}")
    lines += [
        f"  store i32 {state}, ptr %hf.state",
        f"  %hf.went.{at} = call i8 @llvm.coro.suspend(token none, i1 false)",
        f"  switch i8 %hf.went.{at}, label %hf.suspended [ i8 0, label %hf.after.{at} i8 1, label %hf.suspended ]",
        f"hf.after.{at}:",
    ]
    if assigned:
        lines.append(f"  %hf.result.{at} = getelementptr {place.result}, ptr %hf.results, i64 %hf.lane.w")
        lines.append(f"  {assigned} = load {place.result}, ptr %hf.result.{at}")
    return "\n".join(lines)


def _operation(places: list[Place]) -> str:
    """The function that runs a simdgroup's call of a number, by the intrinsic's executor."""
    texts: list[str] = []
    declared: set[str] = set()
    waiting = [f"lanes.{place.name}" for place in places if intrinsics.kind(place.name) == "simd"]
    cases, calls, done = [], [], set()
    for place in places:
        if intrinsics.kind(place.name) == "simd":
            cases.append(f"i32 {place.number}, label %at.{place.number}")
            call = f"call void @lanes.{place.name}(ptr %given, ptr %results, i32 %mask)"
            calls.append(f"at.{place.number}:\n  {call}\n  ret void")
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        definition = intrinsics.lanes(name.removeprefix("lanes.")) if name.startswith("lanes.") else None
        definition = definition or intrinsics.define(name)
        if definition is None:
            raise RunError(f"a kernel calls {name.removeprefix('lanes.')}, whose meaning hf_mps does not know")
        texts.append(definition.text)
        declared |= definition.declares
        waiting += definition.needs
    head = "define internal void @operation(i32 %place, ptr %given, ptr %results, i32 %mask) nounwind {"
    switch = f"  switch i32 %place, label %none [ {' '.join(cases)} ]\nnone:\n  ret void"
    return "\n".join([*sorted(declared), *texts, head, switch, *calls, "}", ""])


def _split(given: str) -> list[str]:
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


def _typed(argument: str) -> tuple[str, str]:
    """The type and the value of an argument, without the notes between them."""
    kind = _TYPE.match(argument)
    assert kind is not None, argument
    return kind.group(1), _NOTES.sub("", argument[kind.end() :].strip())
