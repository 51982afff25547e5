"""The checking mode: each access of a kernel to device or constant memory, bounded to the buffers that were bound.

An access is traced back to the buffers that its address can come from: one parameter as a rule, several where the
kernel chooses, all where the address was read from an argument buffer. One outside goes to a spare place,
and the first is noted: its thread, address, bytes, and buffers. In the entry's `args`, RANGES holds the address of
(start, end, location) of each buffer after their number, and FAULT that of the note.
"""

from __future__ import annotations

import re

from hf_mps.metal.kernels.intrinsics.body import bytes_of
from hf_mps.metal.kernels.lowering import assembly
from hf_mps.metal.kernels.signature import CONSTANT, DEVICE, LOCATIONS, Signature

RANGES, FAULT = LOCATIONS - 1, 2 * LOCATIONS - 1
"""Places in `args` that no buffer has: Metal's last location is 30."""
NOTE_WORDS = 6
"""The note, of 64-bit words: accesses outside, group, thread of it, address, bytes, bits of the locations."""
# Behind the note is the spare place, where an access outside of the buffers reads or writes (check.ll).
NOTE_BYTES = 8 * NOTE_WORDS + 4096

GIVEN = "ptr %hf.ranges, ptr %hf.fault, i64 %hf.group, i32 %hf.linear, "
"""What a checked kernel gets before its own parameters."""
READ = f"""  %hf.ranges.at = getelementptr i64, ptr %args, i64 {RANGES}
  %hf.ranges = load ptr, ptr %hf.ranges.at
  %hf.fault.at = getelementptr i64, ptr %args, i64 {FAULT}
  %hf.fault = load ptr, ptr %hf.fault.at"""
PASSED = "ptr %hf.ranges, ptr %hf.fault, i64 %g, i32 %linear, "

# One without a space may be a buffer's too: in Metal source, a struct's functions take their object as such a pointer.
_POINTER = rf"ptr(?: addrspace\([{DEVICE}{CONSTANT}]\))?(?! addrspace)"
_TYPE = r"<[^>]*>|\[[^\]]*\]|\w+"
_ACCESS = re.compile(
    r"^  (?:%\S+ = )?(?:"
    rf"load (?:atomic )?(?:volatile )?(?P<loaded>{_TYPE}), {_POINTER} (?P<from>%[\w.]+)"
    rf"|store (?:atomic )?(?:volatile )?(?P<stored>{_TYPE}) .+?, {_POINTER} (?P<to>%[\w.]+)"
    rf"|(?:atomicrmw|cmpxchg) (?:weak |volatile )*(?:\w+ )?{_POINTER} (?P<at>%[\w.]+), (?P<held>{_TYPE})"
    r")"
)
_NOTES = r"(?: [a-z_]+(?:\([^)]*\))?(?: \d+)?)*?"
_MEMORY = re.compile(rf"{_POINTER}{_NOTES} (%[\w.]+)")
_ASSIGNED = re.compile(r"^  (%\S+) = (\w+) (.*)$")
EVERY = (1 << LOCATIONS) - 1


def checked(text: str, signature: Signature) -> str:
    """The module with each of @kernel's accesses to buffers behind a check."""
    start = text.index("define dso_local void @kernel(")
    end = text.index("\n}\n", start)
    lines = text[start:end].splitlines()
    sources = _Sources(signature, lines)
    head = lines[0].replace("@kernel(", f"@kernel({GIVEN}").replace(", )", ")")
    body = [head]
    for number, line in enumerate(lines[1:]):
        body += _guarded(line, number, sources)
    check = assembly("check.ll", given=GIVEN.removesuffix(", "), words=NOTE_WORDS)
    return "\n".join([text[:start] + "\n".join(body) + text[end:], check, ""])


def _guarded(line: str, number: int, sources: _Sources) -> list[str]:
    if "@llvm.mem" in line and " call " in line:
        size = re.search(r"i(?:32|64) (%?[\w.]+), i1", line)
        pointers, count = _MEMORY.findall(line), size.group(1) if size else "0"
    else:
        match = _ACCESS.match(line)
        if match is None:
            return [line]
        pointers = [match["from"] or match["to"] or match["at"]]
        count = str(bytes_of(match["loaded"] or match["stored"] or match["held"]))
    made = []
    for part, pointer in enumerate(pointers):
        mask = sources.of(pointer)
        if mask == 0:
            continue
        found = re.search(rf"({_POINTER}){_NOTES} {re.escape(pointer)}(?![\w.])", line)
        assert found is not None
        name, kind = f"%hf.checked.{number}.{part}", found.group(1)
        cast = "bitcast" if kind == "ptr" else "addrspacecast"
        made += [
            f"  {name}.p = {cast} {kind} {pointer} to ptr",
            f"  {name}.c = call ptr @hf.check(ptr {name}.p, i64 {count}, i64 {mask}, {GIVEN.removesuffix(', ')})",
            f"  {name} = {cast} ptr {name}.c to {kind}",
        ]
        line = line[: found.end() - len(pointer)] + name + line[found.end() :]
    return [*made, line]


class _Sources:
    """The buffers that an address of a kernel can come from, as bits of their locations."""

    def __init__(self, signature: Signature, lines: list[str]) -> None:
        self._known: dict[str, int] = {
            f"%{each.parameter}": (EVERY if each.indirect else 0) | 1 << each.location
            for each in signature.bindings
            if each.space in (DEVICE, CONSTANT)
        }
        self._made = {match.group(1): match.group(2, 3) for match in map(_ASSIGNED.match, lines) if match}

    def of(self, value: str, seen: frozenset[str] = frozenset()) -> int:
        """The bits of the buffers; 0 for a variable or constant of the kernel itself."""
        if value in self._known:
            return self._known[value]
        if value in seen or value not in self._made:
            return 0
        operation, rest = self._made[value]
        mask = 0
        if operation in ("load", "inttoptr", "call", "extractvalue"):
            mask = 0 if "@hf.threadgroup(" in rest else EVERY
        else:
            # The operands that the address is made of.
            pattern = r"\[ (%[\w.]+)," if operation == "phi" else r"ptr(?: addrspace\(\d\))? (%[\w.]+)"
            for pointer in re.findall(pattern, rest):
                mask |= self.of(pointer, seen | {value})
        if not seen:
            self._known[value] = mask
        return mask
