"""A kernel's threads as LLVM coroutines: each call that needs other lanes is a place where a thread is suspended.

LLVM splits the function there (passes CoroSplit and others of its default pipeline) and keeps what lives across in a
frame, so that a thread costs a few hundred bytes and a resumption is a call. A suspended thread leaves the number of
the place in its state and the call's arguments in its slot; the operation's result waits in the other slot.
Source of the intrinsics: LLVM's "Coroutines in LLVM", switched-resume lowering.
"""

from __future__ import annotations

import re

from hf_mps.kernels.lowering import entry
from hf_mps.kernels.lowering.flatten import Flat
from hf_mps.kernels.lowering.places import Call, Place, operation, split, suspension

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


def suspended(flat: Flat) -> str:
    """The module with @kernel made the coroutine @thread, and @operation, which runs a simdgroup's call of a number."""
    start = flat.text.index("define dso_local void @kernel(")
    end = flat.text.index("\n}\n", start)
    thread, places = _thread(flat.text[start:end].splitlines())
    rest = flat.text[:start] + flat.text[end + len("\n}\n") :]
    rest = re.sub(r"^declare .*@(air\.|hf\.)[^\n]*\n", "", rest, flags=re.M)
    return rest + thread + "\n}\n" + _DECLARED + operation(places)


def _thread(lines: list[str]) -> tuple[str, list[Place]]:
    head, body = lines[0], lines[1:]
    context = "ptr %hf.top, ptr %hf.state, ptr %hf.given, ptr %hf.results, i32 %hf.lane, ptr addrspace(3) %hf.shared"
    given = head.split("@kernel(", 1)[1]
    parameters, attributes = given.rsplit(")", 1)[0], given.rsplit(")", 1)[1]
    written = [f"define internal ptr @thread({context}, {parameters}){attributes.replace('{', 'presplitcoroutine {')}"]
    # Where the first block has no label of its own, its number follows those of the parameters.
    block, begun = str(sum(bool(re.search(r"%\d+$", each)) for each in split(parameters))), False
    written += [f"{block}:"] if not _LABEL.match(body[0]) else []
    places: list[Place] = []
    last: dict[str, str] = {}
    waiting = Place(1)

    def wait() -> None:
        nonlocal waiting
        if waiting.calls:
            written.append(suspension(waiting))
            last[block] = f"hf.after.{waiting.number}"
            places.append(waiting)
            waiting = Place(waiting.number + 1)

    for line in body:
        label = _LABEL.match(line)
        block = label.group(1) if label else block
        if not begun and not label and " = alloca " not in line:
            written.append(_PRELUDE)
            begun = True
        call = Call.read(line)
        if call is None:
            if waiting.calls and _must_wait(line, waiting):
                wait()
            written.append(own(line))
        else:
            if not waiting.takes(call):
                wait()
            waiting.calls.append(call)
    text = "\n".join([*written, _POSTLUDE])
    text = re.sub(r", %(\S+) \]", lambda match: f", %{last.get(match.group(1), match.group(1))} ]", text)
    # Values without a name must be numbered in the order that they stand in, and results come later now.
    return re.sub(r"(?m)(^|%)(?=\d+\b)", r"\1v", text), places


_MEMORY = re.compile(
    r"^  (?:%\S+ = )?(?:(?:tail |notail )?call .*@(?!llvm\.|hf\.)|.*@llvm\.mem|store |atomicrmw |cmpxchg |fence )"
)
_END = re.compile(r"^  (?:br|ret|switch|unreachable)\b")
_VALUE = re.compile(r"%[\w.$-]+")


def _must_wait(line: str, waiting: Place) -> bool:
    """Whether the calls that wait must be done before a line: it ends the block, needs a result, or changes memory.

    Reading memory may come before a product of matrices, which kernels feed from threadgroup memory; before other
    operations it may not: a kernel may take those for a barrier of the simdgroup.
    """
    if _END.match(line) or _MEMORY.match(line) or not waiting.results.keys().isdisjoint(_VALUE.findall(line)):
        return True
    reads = " = load " in line
    return waiting.calls[0].kind != "simd" or (reads and not all(call.is_product for call in waiting.calls))


def own(line: str, lane: str = "%hf.lane", shared: str = "%hf.shared") -> str:
    """A line of a kernel with our own calls replaced by what the thread was given, and its return by its last place."""
    line = re.sub(r"(?:tail )?call i32 @hf\.lane\(\)(?: #\d+)?", f"add i32 {lane}, 0", line)
    line = re.sub(
        r"(?:tail )?call ptr addrspace\(3\) @hf\.threadgroup\(i64 (\d+)\)(?: #\d+)?",
        rf"getelementptr i8, ptr addrspace(3) {shared}, i64 \1",
        line,
    )
    return "  br label %hf.done" if line.strip() == "ret void" else line
