"""A kernel whose threads wait for one another, as one function that runs a thread from a place to its next one.

Each call that needs other lanes is a place where a thread stops. `@step(place, …)` begins behind the place of that
number (0 is the kernel's beginning), goes on until the next one, leaves there the call's arguments, and says in its
state where it stands. What a thread needs behind a place and made before it lies in the frame of its simdgroup, which
has each value of the 32 lanes side by side: a loop over lanes that calls @step with one place is then plain code for
LLVM, which inlines, unrolls and vectorises it. What follows from the parameters alone is made anew at each beginning.

A place is one cross-lane call, or several of a block that need nothing from one another but results as they are: a
thread then waits once for all of them. In the memory of a simdgroup's arguments (and of its results) each call has
32 structs of its arguments (32 results), one call's after the other's.

The lanes of a simdgroup that stand at the earliest place in the kernel's order do that place's operation and go on,
each to its own next place; the others left that branch, or went past it. So it goes until all stand at a barrier or
at the end, simdgroup after simdgroup; then the barrier opens. Where the lanes that go on are the simdgroup's first
(all 32, as a rule), a loop over them that is compiled for that place alone takes them on: a copy of @step, in which
LLVM knows where it begins. Others, and places for which a copy would be long, go one by one through @step itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import llvmlite.binding as llvm

from hf_mps.core.errors import RunError
from hf_mps.metal.kernels import intrinsics
from hf_mps.metal.kernels.intrinsics.body import Definition, bytes_of
from hf_mps.metal.kernels.lowering import assembly, entry, rows
from hf_mps.metal.kernels.lowering.flatten import Flat
from hf_mps.metal.kernels.lowering.frame import VALUE, Block, blocks, incoming, kept, named, split, typed
from hf_mps.metal.kernels.signature import Signature

BARRIER, DONE = 0x4000_0000, 0xFFFF_FFFF
"""A thread's state is the number of the place where it stands or from where it may go on (0, the kernel's beginning,
1, 2, … in the kernel's order); this bit is set while a barrier there is shut; DONE at the kernel's end."""

CALL = re.compile(
    r"^  (?:(%\S+) = )?(?:(?:tail|notail) )?call (?:[a-z]+ )*?(\S.*?) @(air\.[\w.]+)\((.*)\)(?: #\d+)?(?:, !.*)?$"
)


@dataclass(frozen=True)
class Call:
    """A cross-lane call: what it is assigned to, its result's type, the intrinsic, its arguments' types and values."""

    assigned: str | None
    result: str
    name: str
    given: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, line: str) -> Call | None:
        """The call in a line of a kernel; None where there is none, or one that a lane runs alone."""
        found = CALL.match(line)
        if found is None or intrinsics.kind(found[3]) == "lane":
            return None
        result = found[2].split(")")[-1].strip() if found[2].startswith("(") else found[2]
        return cls(found[1], result, found[3], tuple(typed(each) for each in split(found[4])))

    @property
    def kind(self) -> str:
        """What the intrinsic is: "simd", or one of the barriers."""
        return intrinsics.kind(self.name)

    @property
    def is_product(self) -> bool:
        """Whether this is a product of matrices."""
        return "multiply_accumulate" in self.name

    @property
    def struct(self) -> str:
        """The type of a lane's arguments."""
        return "{ " + ", ".join(kind for kind, _ in self.given) + " }"

    @property
    def bytes(self) -> int:
        """No less than a lane's arguments, or its result, take."""
        return max(2 * sum([_slot(kind) for kind, _ in self.given]), _slot(self.result), 1)


@dataclass
class Place:
    """The calls that threads wait for at one place, and its number."""

    number: int
    calls: list[Call] = field(default_factory=list)

    def takes(self, call: Call) -> bool:
        """Whether a call may join: alone a barrier, as many others as a lane's slot has room for."""
        if not self.calls:
            return True
        everything = [*self.calls, call]
        return all(each.kind == "simd" for each in everything) and sum(c.bytes for c in everything) <= entry.SLOT_BYTES

    @property
    def results(self) -> dict[str, int]:
        """The values that are assigned here, and by which call."""
        return {call.assigned: at for at, call in enumerate(self.calls) if call.assigned}

    @property
    def given_type(self) -> str:
        """A simdgroup's arguments: for each call 32 structs."""
        return "{ " + ", ".join(f"[32 x {call.struct}]" for call in self.calls) + " }"

    @property
    def results_type(self) -> str:
        """A simdgroup's results: for each call 32."""
        kinds = ("{}" if call.result == "void" else call.result for call in self.calls)
        return "{ " + ", ".join(f"[32 x {kind}]" for kind in kinds) + " }"

    def leaving(self) -> list[str]:
        """A thread leaves its arguments, says where it is, and goes."""
        lines = []
        for number, call in enumerate(self.calls):
            for position, (kind, value) in enumerate(call.given if call.kind == "simd" else ()):
                if value in self.results:
                    continue
                slot = f"%hf.given.{self.number}.{number}.{position}"
                inside = f"i64 0, i32 {number}, i64 %hf.lane.w, i32 {position}"
                lines.append(f"  {slot} = getelementptr {self.given_type}, ptr %hf.given, {inside}")
                lines.append(f"  store {kind} {value}, ptr {slot}")
        state = self.number | (BARRIER if self.calls[0].kind == "barrier" else 0)
        return [*lines, f"  store i32 {state}, ptr %hf.state", "  br label %hf.out"]

    def taking(self) -> list[str]:
        """A thread takes the results."""
        lines = []
        for value, number in self.results.items():
            slot = f"%hf.result.{self.number}.{number}"
            inside = f"i64 0, i32 {number}, i64 %hf.lane.w"
            lines.append(f"  {slot} = getelementptr {self.results_type}, ptr %hf.results, {inside}")
            lines.append(f"  {value} = load {self.calls[number].result}, ptr {slot}")
        return lines


def operation(places: Iterable[Place]) -> str:
    """The function that does the calls of a place for a simdgroup, by the intrinsics' executors."""
    places = [place for place in places if place.calls[0].kind == "simd"]
    called = sorted({f"lanes.{call.name}" for place in places for call in place.calls})
    executors = intrinsics.gathered(called, _executor)
    links: dict[tuple[str, int, str], str] = {}
    bodies = []
    for place in places:
        lines = [f"at.{place.number}:"]
        for number, call in enumerate(place.calls):
            given, results = f"%given.{place.number}.{number}", f"%results.{place.number}.{number}"
            lines.append(f"  {given} = getelementptr {place.given_type}, ptr %given, i64 0, i32 {number}")
            lines.append(f"  {results} = getelementptr {place.results_type}, ptr %results, i64 0, i32 {number}")
            for position, (kind, value) in enumerate(call.given):
                earlier = place.results.get(value)
                if earlier is not None and earlier < number:
                    link = links.setdefault((call.struct, position, kind), f"@hf.link.{len(links)}")
                    lines.append(f"  call void {link}(ptr %results.{place.number}.{earlier}, ptr {given})")
            lines.append(f"  call void @lanes.{call.name}(ptr {given}, ptr {results}, i32 %mask)")
        bodies.append("\n".join([*lines, "  ret void"]))
    cases = " ".join(f"i32 {place.number}, label %at.{place.number}" for place in places)
    head = "define internal void @operation(i32 %place, ptr %given, ptr %results, i32 %mask) nounwind {"
    switch = f"  switch i32 %place, label %none [ {cases} ]\nnone:\n  ret void"
    linking = [assembly("link.ll", name=name, struct=s, position=p, kind=k) for (s, p, k), name in links.items()]
    return "\n".join([*executors, *linking, head, switch, *bodies, "}", ""])


def _executor(name: str) -> Definition:
    """An intrinsic for a whole simdgroup (`lanes.air.…`), or what a definition needs."""
    own = name.removeprefix("lanes.")
    definition = (intrinsics.lanes(own) if own != name else None) or intrinsics.define(name)
    if definition is None:
        raise RunError(f"a kernel calls {own}, whose meaning hf_mps does not know")
    return definition


def _slot(kind: str) -> int:
    """The bytes of a type, to the alignment of a vector."""
    return 1 << (bytes_of(kind, 8) - 1).bit_length()


CONTEXT = (
    "ptr noalias %hf.state, ptr noalias %hf.given, ptr noalias %hf.results, ptr noalias %hf.frame, i32 %hf.lane, "
    "ptr addrspace(3) %hf.shared"
)
"""What @step gets between the place and the kernel's parameters: where the lane's state is, where its simdgroup's
arguments, results and frame are, the lane's index, threadgroup memory."""


@dataclass(frozen=True)
class Steps:
    """The module with @kernel made @step, @operation for a simdgroup's calls of a place, and the type %hf.frame."""

    text: str
    reach: tuple[int, ...]
    """For the beginning and each place the lines that a thread may run from there to its next place."""


def steps(flat: Flat, uniform: Iterable[str] = ()) -> Steps:
    """The kernel as steps. `uniform` has the parameters ("%3") that are the same for a threadgroup's threads."""
    start = flat.text.index("define dso_local void @kernel(")
    end = flat.text.index("\n}\n", start)
    rest = flat.text[:start] + flat.text[end + len("\n}\n") :]
    head, *body = named(flat.text[start:end]).splitlines()
    parameters = head.split("@kernel(", 1)[1].rsplit(")", 1)[0]
    first = "v" + str(sum(bool(re.search(r"%v\d+$", each)) for each in split(parameters)))
    whole = blocks(body, first)
    # The type of each value of @kernel that an instruction makes.
    body = [line for block in whole for line in (f"{block.label}:", *block.lines)]
    kernel = llvm.parse_assembly("\n".join([rest, head, *body, "}"])).get_function("kernel")
    types = {
        f"%{instruction.name}": str(instruction.type)
        for block in kernel.blocks
        for instruction in block.instructions
        if instruction.name
    }
    function, places = _divided(whole)
    frame = kept(function, types, {named(each) for each in uniform})
    cases = " ".join(f"i32 {place.number}, label %hf.after.{place.number}" for place in places)
    lines = [
        f"define internal void @step(i32 %hf.place, {CONTEXT}, {parameters}) nounwind {{\nhf.begin:",
        "  %hf.lane.w = zext i32 %hf.lane to i64",
        *(own(line) for line in frame.beginning),
        f"  switch i32 %hf.place, label %{function[0].label} [ {cases} ]",
        *(*frame.body(function), _DONE),
    ]
    rest = re.sub(r"^declare .*@(air\.|hf\.)[^\n]*\n", "", rest, flags=re.M)
    text = f"{rest}{frame.type}\n" + "\n".join(lines) + "\n}\n" + operation(places)
    return Steps(text, _reach(function, len(places)))


_DONE = f"""hf.done:
  store i32 {DONE - (1 << 32)}, ptr %hf.state
  br label %hf.out
hf.out:
  ret void"""


def _reach(function: list[Block], places: int) -> tuple[int, ...]:
    of = {block.label: block for block in function}
    found = []
    for start in (function[0].label, *(f"hf.after.{number}" for number in range(1, places + 1))):
        waiting, seen = [start], {start}
        while waiting:
            block = of[waiting.pop()]
            following = set() if block.after else {label for label in block.following if label in of} - seen
            seen |= following
            waiting += following
        found.append(sum(len(of[label].lines) for label in seen))
    return tuple(found)


def _divided(function: list[Block]) -> tuple[list[Block], list[Place]]:
    """The blocks with each place at the end of one, and what its results are for at the beginning of the next."""
    divided: list[Block] = []
    places: list[Place] = []
    last: dict[str, str] = {}
    for block in function:
        current, waiting = Block(block.label), Place(len(places) + 1)
        divided.append(current)

        def wait() -> None:
            nonlocal current, waiting
            if waiting.calls:
                current.lines += waiting.leaving()
                current.after = f"hf.after.{waiting.number}"
                places.append(waiting)
                current = Block(current.after, waiting.taking())
                divided.append(current)
                waiting = Place(len(places) + 1)

        for line in block.lines:
            if "@llvm.lifetime." in line:
                continue  # of a variable that a later step may still need, by its place in the text
            call = Call.read(line)
            if call is None:
                if waiting.calls and _must_wait(line, waiting):
                    wait()
                current.lines.append(own(line))
            else:
                if not waiting.takes(call):
                    wait()
                waiting.calls.append(call)
        last[block.label] = current.label
    for block in divided:
        for at, line in enumerate(block.lines):
            if incoming(line) is not None:  # a phi names the blocks that its values come from as they are called now
                block.lines[at] = re.sub(r", %(\S+) \]", lambda each: f", %{last.get(each[1], each[1])} ]", line)
    return divided, places


_MEMORY = re.compile(
    r"^  (?:%\S+ = )?(?:(?:tail |notail )?call .*@(?!llvm\.|hf\.)|.*@llvm\.mem|store |atomicrmw |cmpxchg |fence )"
)
_END = re.compile(r"^  (?:br|ret|switch|unreachable)\b")


def _must_wait(line: str, waiting: Place) -> bool:
    """Whether the calls that wait must be done before a line: it ends the block, needs a result, or changes memory.

    Reading memory may come before a product of matrices, which kernels feed from threadgroup memory; before other
    operations it may not: a kernel may take those for a barrier of the simdgroup.
    """
    if _END.match(line) or _MEMORY.match(line) or not waiting.results.keys().isdisjoint(VALUE.findall(line)):
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


LONGEST, ALTOGETHER = 400, 1000
"""Lines of a copy of @step, and of all its copies, beyond which they cost more time in compilation than they save."""


def waiting(signature: Signature, steps: Steps, *, checked: bool = False) -> str:
    """The entry, and the functions that it calls."""
    copied = _copied(steps.reach)
    thread = f"{assembly('lane.ll', lanes=entry.LANES)}\n{entry.values(signature)}"
    call = f"call void @step(i32 {{}}, {_CONTEXT}, {entry.arguments(signature, checked)})"
    turns = [
        rows.renamed(assembly("turn.ll", place=place, thread=thread, call=call.format(place)), f"turn.{place}")
        for place in copied
    ]
    group = assembly(
        "waiting.ll",
        states=entry.STATES_AT, positions=entry.POSITIONS_AT, given=entry.GIVEN_AT, results=entry.RESULTS_AT,
        frames=entry.FRAMES_AT, room=entry.FRAMES_BYTES, barrier=BARRIER, slots=32 * entry.SLOT_BYTES,
        cases=" ".join(f"i32 {place}, label %turn.{place}" for place in copied), turns="\n".join(turns),
        one=rows.renamed(assembly("one.ll", thread=thread, call=call.format("%least")), "one"),
    )  # fmt: skip
    known = entry.POSITIONS_AT + 12 * entry.LANES
    # Positions are kept from group to group of a run.
    forget = f"  %known = getelementptr i8, ptr %arena, i64 {known}\n  store i32 0, ptr %known"
    stand = assembly("stand.ll", lanes=entry.LANES, known=3 * entry.LANES, done=DONE - (1 << 32), mask=BARRIER - 1)
    return entry.entry(signature, group, checked, forget) + stand + "\n"


def _copied(reach: Sequence[int]) -> list[int]:
    """The places for which there is a copy: the shortest first."""
    copied, lines = [], 0
    for length, place in sorted((length, place) for place, length in enumerate(reach)):
        lines += length
        if length <= LONGEST and lines <= ALTOGETHER:
            copied.append(place)
    return sorted(copied)


_CONTEXT = "ptr %state, ptr %lane.given, ptr %lane.results, ptr %lane.frame, i32 %lane, ptr addrspace(3) %shared"
