"""Where threads wait for one another: what they leave there, and what is done when all of a simdgroup stand there.

A place is one cross-lane call, or several of a block that need nothing from one another but results as they are: a
thread then waits once for all of them. In the memory of a simdgroup's arguments (and of its results) each call has
32 structs of its arguments (32 results), one call's after the other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hf_mps.core.errors import RunError
from hf_mps.metal.kernels import intrinsics
from hf_mps.metal.kernels.lowering import entry

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
        sizes = [_bytes(kind) for kind, _ in self.given]
        return max(2 * sum(sizes), _bytes(self.result), 1)


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
        """A thread leaves its arguments, says where it stands, and goes."""
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
        for assigned, number in self.results.items():
            slot = f"%hf.result.{self.number}.{number}"
            inside = f"i64 0, i32 {number}, i64 %hf.lane.w"
            lines.append(f"  {slot} = getelementptr {self.results_type}, ptr %hf.results, {inside}")
            lines.append(f"  {assigned} = load {self.calls[number].result}, ptr {slot}")
        return lines


def operation(places: Iterable[Place]) -> str:
    """The function that does the calls of a place for a simdgroup, by the intrinsics' executors."""
    places = [place for place in places if place.calls[0].kind == "simd"]
    executors = _executors({call.name for place in places for call in place.calls})
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
    linking = [_LINK.format(name=name, struct=s, position=p, kind=k) for (s, p, k), name in links.items()]
    return "\n".join([*executors, *linking, head, switch, *bodies, "}", ""])


# What a call gives is what a later one takes, lane by lane.
_LINK = """define internal void {name}(ptr %from, ptr %to) alwaysinline nounwind {{
entry:
  br label %lane
lane:
  %i = phi i64 [ 0, %entry ], [ %next, %lane ]
  %source = getelementptr {kind}, ptr %from, i64 %i
  %value = load {kind}, ptr %source
  %target = getelementptr {struct}, ptr %to, i64 %i, i32 {position}
  store {kind} %value, ptr %target
  %next = add nuw i64 %i, 1
  %more = icmp ult i64 %next, 32
  br i1 %more, label %lane, label %done
done:
  ret void
}}"""


def _executors(names: set[str]) -> list[str]:
    """The definitions of the intrinsics, and of all that they need, after what they declare."""
    texts: list[str] = []
    declared: set[str] = set()
    waiting, done = [f"lanes.{name}" for name in sorted(names)], set()
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
    return [*sorted(declared), *texts]


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


def _bytes(kind: str) -> int:
    """The bytes of a type; of a vector, to its alignment."""
    vector = re.fullmatch(r"<(\d+) x (\w+)>", kind)
    scalar = vector[2] if vector else kind
    bits = {"half": 16, "bfloat": 16, "float": 32, "double": 64}.get(scalar) or (
        int(scalar[1:]) if re.fullmatch(r"i\d+", scalar) else 64
    )
    size = max(1, bits // 8) * (int(vector[1]) if vector else 1)
    return 1 << (size - 1).bit_length()
