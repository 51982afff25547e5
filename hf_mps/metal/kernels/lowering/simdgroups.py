"""The entry of a kernel whose threads wait for one another: each simdgroup's lanes go from place to place together.

The lanes of a simdgroup that stand at the earliest place in the kernel's order do that place's operation and go on,
each to its own next place; the others left that branch, or went past it. So it goes until all stand at a barrier or
at the end, simdgroup after simdgroup; then the barrier opens. Where the lanes that go on are the simdgroup's first
(all 32, as a rule), a loop over them that is compiled for that place alone takes them on: a copy of @step, in which
LLVM knows where it begins. Others, and places for which a copy would be long, go one by one through @step itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_mps.metal.kernels.lowering import entry, rows
from hf_mps.metal.kernels.lowering.lanes import BARRIER, DONE, Steps
from hf_mps.metal.kernels.signature import Signature

LONGEST, ALTOGETHER = 400, 1000
"""Lines of a copy of @step, and of all its copies, beyond which they cost more time in compilation than they save."""


def waiting(signature: Signature, steps: Steps, *, checked: bool = False) -> str:
    """The entry, and the functions that it calls."""
    copied = _copied(steps.reach)
    given = entry.arguments(signature, checked)
    thread = f"{_THREAD}\n{entry.values(signature)}"
    call = f"call void @step(i32 {{place}}, {_CONTEXT}, {given})"
    turns = [
        rows.renamed(_TURN.format(place=place, thread=thread, call=call.format(place=place)), f"turn.{place}")
        for place in copied
    ]
    cases = " ".join(f"i32 {place}, label %turn.{place}" for place in copied)
    one = rows.renamed(_ONE.format(thread=thread, call=call.format(place="%least")), "one")
    body = _GROUP.format(
        states=entry.STATES_AT, positions=entry.POSITIONS_AT, given=entry.GIVEN_AT, results=entry.RESULTS_AT,
        frames=entry.FRAMES_AT, room=entry.FRAMES_BYTES, barrier=BARRIER, slots=32 * entry.SLOT_BYTES, cases=cases,
        turns="\n".join(turns), one=one,
    )  # fmt: skip
    shut = _OPENED.format(barrier=BARRIER, done=DONE - (1 << 32), mask=BARRIER - 1)
    head = entry.begin(signature, checked).replace("entry:", f"entry:{_UNKNOWN}")
    return entry.HEAD + head + body + entry.EPILOGUE + "}\n" + entry.DECLARED + _BEGIN + shut


def _copied(reach: Sequence[int]) -> list[int]:
    """The places for which there is a copy: the shortest first."""
    copied, lines = [], 0
    for length, place in sorted((length, place) for place, length in enumerate(reach)):
        lines += length
        if length <= LONGEST and lines <= ALTOGETHER:
            copied.append(place)
    return sorted(copied)


_CONTEXT = "ptr %state, ptr %lane.given, ptr %lane.results, ptr %lane.frame, i32 %lane, ptr addrspace(3) %shared"
_THREAD = f"""  %lane.w = zext i32 %lane to i64
  %linear = add nuw i32 %base, %lane
  %linear.w = zext i32 %linear to i64
  %state = getelementptr i32, ptr %lane.states, i64 %lane.w
  %lidx.at = getelementptr i32, ptr %positions, i64 %linear.w
  %lidx = load i32, ptr %lidx.at
  %lidy.at = getelementptr i32, ptr %lidx.at, i64 {entry.LANES}
  %lidy = load i32, ptr %lidy.at
  %lidz.at = getelementptr i32, ptr %lidy.at, i64 {entry.LANES}
  %lidz = load i32, ptr %lidz.at
  %posx = add nuw i32 %startx, %lidx
  %posy = add nuw i32 %starty, %lidy
  %posz = add nuw i32 %startz, %lidz
  %simdgroup = lshr i32 %linear, 5
  %quadgroup = lshr i32 %linear, 2
  %quad.lane = and i32 %linear, 3"""

_TURN = """turn.{place}:
  %lane = phi i32 [ 0, %turns ], [ %next, %turn.{place} ]
{thread}
  {call} alwaysinline
  %next = add nuw i32 %lane, 1
  %more = icmp ult i32 %next, %count
  br i1 %more, label %turn.{place}, label %earliest"""
_ONE = """one:
  %remaining = phi i32 [ %mask, %turns ], [ %mask, %operate ], [ %next, %one ]
  %lane = call i32 @llvm.cttz.i32(i32 %remaining, i1 true)
{thread}
  {call} noinline
  %less = sub i32 %remaining, 1
  %next = and i32 %remaining, %less
  %more = icmp ne i32 %next, 0
  br i1 %more, label %one, label %earliest"""

# Positions are kept from group to group of a run.
_UNKNOWN = f"""
  %positions.of = getelementptr i8, ptr %arena, i64 {entry.POSITIONS_AT + 12 * entry.LANES}
  store i32 0, ptr %positions.of"""
_GROUP = """
  %simdgroups.w = zext i32 %simdgroups to i64
  %frame.end = getelementptr %hf.frame.type, ptr null, i64 %simdgroups.w
  %frame.bytes = ptrtoint ptr %frame.end to i64
  %fits = icmp ule i64 %frame.bytes, {room}
  br i1 %fits, label %stand, label %full
full:
  ret i32 1
stand:
  %states = getelementptr i8, ptr %arena, i64 {states}
  %positions = getelementptr i8, ptr %arena, i64 {positions}
  %given = getelementptr i8, ptr %arena, i64 {given}
  %results = getelementptr i8, ptr %arena, i64 {results}
  %frames = getelementptr i8, ptr %arena, i64 {frames}
  call void @stand(ptr %states, ptr %positions, i32 %sizex, i32 %sizey, i32 %size.all)
  br label %round
round:
  br label %simdgroup
simdgroup:
  %base = phi i32 [ 0, %round ], [ %base.next, %simdgroup.end ]
  %base.w = zext i32 %base to i64
  %lane.states = getelementptr i32, ptr %states, i64 %base.w
  %number.w = lshr exact i64 %base.w, 5
  %slots = mul i64 %number.w, {slots}
  %lane.given = getelementptr i8, ptr %given, i64 %slots
  %lane.results = getelementptr i8, ptr %results, i64 %slots
  %lane.frame = getelementptr %hf.frame.type, ptr %frames, i64 %number.w
  br label %earliest
earliest:
  %state = load <32 x i32>, ptr %lane.states, align 64
  %least = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %state)
  %goes = icmp ult i32 %least, {barrier}
  br i1 %goes, label %operate, label %simdgroup.end
operate:
  %least.one = insertelement <32 x i32> poison, i32 %least, i32 0
  %leasts = shufflevector <32 x i32> %least.one, <32 x i32> poison, <32 x i32> zeroinitializer
  %there = icmp eq <32 x i32> %state, %leasts
  %mask = bitcast <32 x i1> %there to i32
  call void @operation(i32 %least, ptr %lane.given, ptr %lane.results, i32 %mask)
  %mask.more = add i32 %mask, 1
  %gap = and i32 %mask, %mask.more
  %in.front = icmp eq i32 %gap, 0
  br i1 %in.front, label %turns, label %one
turns:
  %count = call i32 @llvm.ctpop.i32(i32 %mask)
  switch i32 %least, label %one [ {cases} ]
{turns}
{one}
simdgroup.end:
  %base.next = add nuw i32 %base, 32
  %base.more = icmp ult i32 %base.next, %size.all
  br i1 %base.more, label %simdgroup, label %barrier
barrier:
  %opened = call i1 @opened(ptr %states, i32 %size.all)
  br i1 %opened, label %round, label %group.end
"""

_BEGIN = f"""
define internal void @stand(ptr %states, ptr %positions, i32 %x, i32 %y, i32 %count) nounwind {{
begin:
  %key.at = getelementptr i32, ptr %positions, i64 {3 * entry.LANES}
  %key.x = load i32, ptr %key.at
  %key.y.at = getelementptr i32, ptr %key.at, i64 1
  %key.y = load i32, ptr %key.y.at
  %key.count.at = getelementptr i32, ptr %key.at, i64 2
  %key.count = load i32, ptr %key.count.at
  %same.x = icmp eq i32 %x, %key.x
  %same.y = icmp eq i32 %y, %key.y
  %same.count = icmp ule i32 %count, %key.count
  %same.xy = and i1 %same.x, %same.y
  %same = and i1 %same.xy, %same.count
  br i1 %same, label %stand, label %new
new:
  store i32 %x, ptr %key.at
  store i32 %y, ptr %key.y.at
  store i32 %count, ptr %key.count.at
  br label %position
position:
  %linear = phi i32 [ 0, %new ], [ %linear.next, %position ]
  %lidx = phi i32 [ 0, %new ], [ %lidx.next, %position ]
  %lidy = phi i32 [ 0, %new ], [ %lidy.next, %position ]
  %lidz = phi i32 [ 0, %new ], [ %lidz.next, %position ]
  %linear.w = zext i32 %linear to i64
  %x.at = getelementptr i32, ptr %positions, i64 %linear.w
  store i32 %lidx, ptr %x.at
  %y.at = getelementptr i32, ptr %x.at, i64 {entry.LANES}
  store i32 %lidy, ptr %y.at
  %z.at = getelementptr i32, ptr %y.at, i64 {entry.LANES}
  store i32 %lidz, ptr %z.at
  %x.one = add nuw i32 %lidx, 1
  %x.over = icmp eq i32 %x.one, %x
  %lidx.next = select i1 %x.over, i32 0, i32 %x.one
  %x.carry = zext i1 %x.over to i32
  %y.one = add nuw i32 %lidy, %x.carry
  %y.over = icmp eq i32 %y.one, %y
  %lidy.next = select i1 %y.over, i32 0, i32 %y.one
  %y.carry = zext i1 %y.over to i32
  %lidz.next = add nuw i32 %lidz, %y.carry
  %linear.next = add nuw i32 %linear, 1
  %more = icmp ult i32 %linear.next, %count
  br i1 %more, label %position, label %stand
stand:
  %base = phi i32 [ 0, %begin ], [ 0, %position ], [ %base.next, %stand ]
  %base.w = zext i32 %base to i64
  %left = sub i32 %count, %base
  %left.one = insertelement <32 x i32> poison, i32 %left, i32 0
  %lefts = shufflevector <32 x i32> %left.one, <32 x i32> poison, <32 x i32> zeroinitializer
  %gone = icmp uge <32 x i32> <{", ".join(f"i32 {lane}" for lane in range(32))}>, %lefts
  %state = sext <32 x i1> %gone to <32 x i32>
  %state.at = getelementptr i32, ptr %states, i64 %base.w
  store <32 x i32> %state, ptr %state.at, align 64
  %base.next = add nuw i32 %base, 32
  %stand.more = icmp ult i32 %base.next, %count
  br i1 %stand.more, label %stand, label %over
over:
  ret void
}}
"""

_OPENED = """
define internal i1 @opened(ptr %states, i32 %count) nounwind {{
begin:
  br label %simdgroup
simdgroup:
  %base = phi i32 [ 0, %begin ], [ %base.next, %simdgroup ]
  %any = phi i1 [ false, %begin ], [ %any.next, %simdgroup ]
  %base.w = zext i32 %base to i64
  %at = getelementptr i32, ptr %states, i64 %base.w
  %state = load <32 x i32>, ptr %at, align 64
  %waits = icmp ne <32 x i32> %state, splat (i32 {done})
  %open = and <32 x i32> %state, splat (i32 {mask})
  %next = select <32 x i1> %waits, <32 x i32> %open, <32 x i32> %state
  store <32 x i32> %next, ptr %at, align 64
  %here = call i1 @llvm.vector.reduce.or.v32i1(<32 x i1> %waits)
  %any.next = or i1 %any, %here
  %base.next = add nuw i32 %base, 32
  %more = icmp ult i32 %base.next, %count
  br i1 %more, label %simdgroup, label %over
over:
  ret i1 %any.next
}}
declare i32 @llvm.vector.reduce.umin.v32i32(<32 x i32>)
declare i1 @llvm.vector.reduce.or.v32i1(<32 x i1>)
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.ctpop.i32(i32)
"""
