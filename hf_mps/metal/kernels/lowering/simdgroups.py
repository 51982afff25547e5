"""The entry of a kernel whose threads wait for one another: each simdgroup's lanes go from place to place together.

The lanes of a simdgroup that stand at the earliest place in the kernel's order do that place's operation and go on,
each to its own next place; the others left that branch, or went past it. So it goes until all stand at a barrier or
at the end, simdgroup after simdgroup; then the barrier opens. Where the lanes that go on are the simdgroup's first
(all 32, as a rule), a loop over them that is compiled for that place alone takes them on: a copy of @step, in which
LLVM knows where it begins. Others, and places for which a copy would be long, go one by one through @step itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_mps.metal.kernels.lowering import assembly, entry, rows
from hf_mps.metal.kernels.lowering.lanes import BARRIER, DONE, Steps
from hf_mps.metal.kernels.signature import Signature

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
