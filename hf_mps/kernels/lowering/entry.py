"""The entry of a compiled kernel: a run of threadgroups, each a loop over its threads or a set of coroutines.

    i32 entry(i64 args[64], i32 grid[9], i64 first, i64 last, ptr arena)

`args` holds the buffers' addresses by location and, from 32 on, the offsets of threadgroup memory. `grid` is the
threads of the grid, of a threadgroup, and the threadgroups, three of each; the last threadgroup of a dimension is
smaller where the threads are no multiple. Groups are numbered with x the fastest; `first` to `last` (not included) run.
`arena` is this OS thread's memory (ARENA says how it is divided). The result is 0, or 1 where the arena is too small.
"""

from __future__ import annotations

from hf_mps.kernels.lowering import checks, parameters, rows
from hf_mps.kernels.signature import Signature

SHARED_BYTES = 64 << 10
"""Threadgroup memory: a Mac has 32 KiB, some kernels state more than they use."""
SLOT_BYTES = 1 << 10
"""A lane's arguments, or its result, of one cross-lane operation: three matrices of 64 floats at the most."""
LANES = 1024
STATES_AT = SHARED_BYTES
HANDLES_AT = STATES_AT + 4 * LANES
GIVEN_AT = HANDLES_AT + 8 * LANES
RESULTS_AT = GIVEN_AT + SLOT_BYTES * LANES
FRAMES_AT = RESULTS_AT + SLOT_BYTES * LANES
FRAME_BYTES = 1 << 20
"""The most that a thread's own variables may take."""
ARENA_BYTES = FRAMES_AT + (64 << 20) + FRAME_BYTES
"""Address space of an arena; the pages that no kernel touches cost nothing."""

_AXES = "xyz"


def prologue() -> str:
    """Read the grid; begin the loop over groups; work out this group's position and size."""
    lines = ["entry:"]
    for at, name in enumerate(f"{kind}{axis}" for kind in ("threads", "full", "groups") for axis in _AXES):
        lines.append(f"  %{name}.at = getelementptr i32, ptr %grid, i64 {at}")
        lines.append(f"  %{name} = load i32, ptr %{name}.at")
    lines += [
        "  %shared = addrspacecast ptr %arena to ptr addrspace(3)",
        "  %wide.x = zext i32 %groupsx to i64",
        "  %wide.y = zext i32 %groupsy to i64",
        "  %wide.xy = mul i64 %wide.x, %wide.y",
        "{pointers}",
        "  %any = icmp ult i64 %first, %last",
        "  br i1 %any, label %group, label %finished",
        "group:",
        "  %g = phi i64 [ %first, %entry ], [ %g.next, %group.end ]",
        "  %gz.w = udiv i64 %g, %wide.xy",
        "  %rest = urem i64 %g, %wide.xy",
        "  %gy.w = udiv i64 %rest, %wide.x",
        "  %gx.w = urem i64 %rest, %wide.x",
    ]
    for axis in _AXES:
        lines += [
            f"  %group{axis} = trunc i64 %g{axis}.w to i32",
            f"  %start{axis} = mul i32 %group{axis}, %full{axis}",
            f"  %left{axis} = sub i32 %threads{axis}, %start{axis}",
            f"  %size{axis} = call i32 @llvm.umin.i32(i32 %left{axis}, i32 %full{axis})",
        ]
    lines += [
        "  %size.xy = mul i32 %sizex, %sizey",
        "  %size.all = mul i32 %size.xy, %sizez",
        "  %size.up = add i32 %size.all, 31",
        "  %simdgroups = lshr i32 %size.up, 5",
    ]
    return "\n".join(lines)


_EPILOGUE = """
group.end:
  %g.next = add nuw i64 %g, 1
  %more = icmp ult i64 %g.next, %last
  br i1 %more, label %group, label %finished
finished:
  ret i32 0
"""

_HEAD = "define dso_local i32 @entry(ptr %args, ptr %grid, i64 %first, i64 %last, ptr %arena) nounwind {\n"

_LOOPS = """
  br label %z
z:
  %lidz = phi i32 [ 0, %group ], [ %lidz.next, %z.end ]
  br label %y
y:
  %lidy = phi i32 [ 0, %z ], [ %lidy.next, %y.end ]
{row}
y.end:
  %lidy.next = add nuw nsw i32 %lidy, 1
  %y.more = icmp ult i32 %lidy.next, %sizey
  br i1 %y.more, label %y, label %z.end
z.end:
  %lidz.next = add nuw nsw i32 %lidz, 1
  %z.more = icmp ult i32 %lidz.next, %sizez
  br i1 %z.more, label %z, label %group.end
"""

# Unsigned sums that cannot wrap: a grid has fewer than 2^32 threads in a dimension. LLVM vectorises on that.
_THREAD = """  %posx = add nuw i32 %startx, %lidx
  %posy = add nuw i32 %starty, %lidy
  %posz = add nuw i32 %startz, %lidz
  %row = mul i32 %lidz, %sizey
  %row.y = add i32 %row, %lidy
  %row.x = mul i32 %row.y, %sizex
  %linear = add i32 %row.x, %lidx
  %lane = and i32 %linear, 31
  %simdgroup = lshr i32 %linear, 5"""


def loops(signature: Signature, *, checked: bool = False, ordinary: str | None = None) -> str:
    """The entry of a kernel whose threads never wait for one another: plain loops, the innermost along x.

    `ordinary` is the answer of a Question (rows.py) that stands in the module, for kernels that have one.
    """
    call = f"  call void @kernel({_arguments(signature, checked)})"
    values = f"{_THREAD}\n{parameters.values(signature)}"
    row = rows.plain(values, call) if ordinary is None else rows.guarded(values, call, ordinary)
    declared = _DECLARED + (rows.DECLARED if ordinary else "")
    return _HEAD + _begin(signature, checked) + _LOOPS.format(row=row) + _EPILOGUE + "}\n" + declared


_THREADS = """
  %states = getelementptr i8, ptr %arena, i64 {states_at}
  %handles = getelementptr i8, ptr %arena, i64 {handles_at}
  %given = getelementptr i8, ptr %arena, i64 {given_at}
  %results = getelementptr i8, ptr %arena, i64 {results_at}
  %frames = getelementptr i8, ptr %arena, i64 {frames_at}
  %frames.end = getelementptr i8, ptr %arena, i64 {frames_end}
  store ptr %frames, ptr %top
  br label %start
start:
  %linear = phi i32 [ 0, %group ], [ %linear.next, %started ]
  %lidx = phi i32 [ 0, %group ], [ %lidx.next, %started ]
  %lidy = phi i32 [ 0, %group ], [ %lidy.next, %started ]
  %lidz = phi i32 [ 0, %group ], [ %lidz.next, %started ]
  %frame = load ptr, ptr %top
  %fits = icmp ule ptr %frame, %frames.end
  br i1 %fits, label %started, label %full
full:
  ret i32 1
started:
  %posx = add nuw i32 %startx, %lidx
  %posy = add nuw i32 %starty, %lidy
  %posz = add nuw i32 %startz, %lidz
  %lane = and i32 %linear, 31
  %simdgroup = lshr i32 %linear, 5
{values}
  %linear.w = zext i32 %linear to i64
  %simdgroup.w = zext i32 %simdgroup to i64
  %state = getelementptr i32, ptr %states, i64 %linear.w
  %slots = mul i64 %simdgroup.w, {simdgroup_bytes}
  %thread.given = getelementptr i8, ptr %given, i64 %slots
  %thread.results = getelementptr i8, ptr %results, i64 %slots
  %handle = call ptr @thread(ptr %top, ptr %state, ptr %thread.given, ptr %thread.results, {context}{arguments})
  %handle.at = getelementptr ptr, ptr %handles, i64 %linear.w
  store ptr %handle, ptr %handle.at
  %linear.next = add nuw i32 %linear, 1
  %x.one = add nuw i32 %lidx, 1
  %x.over = icmp eq i32 %x.one, %sizex
  %lidx.next = select i1 %x.over, i32 0, i32 %x.one
  %x.carry = zext i1 %x.over to i32
  %y.one = add nuw i32 %lidy, %x.carry
  %y.over = icmp eq i32 %y.one, %sizey
  %lidy.next = select i1 %y.over, i32 0, i32 %y.one
  %y.carry = zext i1 %y.over to i32
  %lidz.next = add nuw i32 %lidz, %y.carry
  %start.more = icmp ult i32 %linear.next, %size.all
  br i1 %start.more, label %start, label %started.all
started.all:
  call void @phases(ptr %handles, ptr %states, ptr %given, ptr %results, i32 %size.all)
  br label %group.end
"""

BARRIER, DONE = 0x4000_0000, 0xFFFF_FFFF
"""A thread's state is the number of the cross-lane call where it stands (1, 2, … in the kernel's order), or these."""

_PHASES = """
define internal void @phases(ptr %handles, ptr %states, ptr %given, ptr %results, i32 %count) nounwind {{
begin:
  %count.31 = add i32 %count, 31
  %up = and i32 %count.31, -32
  %ragged = icmp ult i32 %count, %up
  br i1 %ragged, label %fill, label %round
fill:
  %f = phi i32 [ %count, %begin ], [ %f.next, %fill ]
  %f.w = zext i32 %f to i64
  %f.at = getelementptr i32, ptr %states, i64 %f.w
  store i32 -1, ptr %f.at
  %f.next = add nuw i32 %f, 1
  %f.more = icmp ult i32 %f.next, %up
  br i1 %f.more, label %fill, label %round
round:
  br label %simdgroup
simdgroup:
  %base = phi i32 [ 0, %round ], [ %base.next, %simdgroup.end ]
  %base.w = zext i32 %base to i64
  %lane.states = getelementptr i32, ptr %states, i64 %base.w
  %lane.handles = getelementptr ptr, ptr %handles, i64 %base.w
  %slots = mul i64 %base.w, {slot}
  %lane.given = getelementptr i8, ptr %given, i64 %slots
  %lane.results = getelementptr i8, ptr %results, i64 %slots
  br label %earliest
earliest:
  %state = load <32 x i32>, ptr %lane.states, align 4
  %least = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %state)
  %waits = icmp ult i32 %least, {barrier}
  br i1 %waits, label %operate, label %simdgroup.end
operate:
  %first = insertelement <32 x i32> poison, i32 %least, i32 0
  %leasts = shufflevector <32 x i32> %first, <32 x i32> poison, <32 x i32> zeroinitializer
  %there = icmp eq <32 x i32> %state, %leasts
  %mask = bitcast <32 x i1> %there to i32
  call void @operation(i32 %least, ptr %lane.given, ptr %lane.results, i32 %mask)
  br label %resume
resume:
  %remaining = phi i32 [ %mask, %operate ], [ %remaining.next, %resume ]
  %r = call i32 @llvm.cttz.i32(i32 %remaining, i1 true)
  %r.w = zext i32 %r to i64
  %r.at = getelementptr ptr, ptr %lane.handles, i64 %r.w
  %r.handle = load ptr, ptr %r.at
  call void @llvm.coro.resume(ptr %r.handle)
  %remaining.less = sub i32 %remaining, 1
  %remaining.next = and i32 %remaining, %remaining.less
  %resume.more = icmp ne i32 %remaining.next, 0
  br i1 %resume.more, label %resume, label %earliest
simdgroup.end:
  %base.next = add nuw i32 %base, 32
  %base.more = icmp ult i32 %base.next, %count
  br i1 %base.more, label %simdgroup, label %barrier
barrier:
  %b = phi i32 [ 0, %simdgroup.end ], [ %b.next, %barrier.end ]
  %any = phi i1 [ false, %simdgroup.end ], [ %any.next, %barrier.end ]
  %b.w = zext i32 %b to i64
  %b.state.at = getelementptr i32, ptr %states, i64 %b.w
  %b.state = load i32, ptr %b.state.at
  %here = icmp eq i32 %b.state, {barrier}
  br i1 %here, label %pass, label %barrier.end
pass:
  %b.at = getelementptr ptr, ptr %handles, i64 %b.w
  %b.handle = load ptr, ptr %b.at
  call void @llvm.coro.resume(ptr %b.handle)
  br label %barrier.end
barrier.end:
  %any.next = phi i1 [ %any, %barrier ], [ true, %pass ]
  %b.next = add nuw i32 %b, 1
  %barrier.more = icmp ult i32 %b.next, %count
  br i1 %barrier.more, label %barrier, label %rounds
rounds:
  br i1 %any.next, label %round, label %over
over:
  ret void
}}
declare i32 @llvm.vector.reduce.umin.v32i32(<32 x i32>)
declare void @llvm.coro.resume(ptr)
declare i32 @llvm.cttz.i32(i32, i1)
"""

CONTEXT = "i32 %lane, ptr addrspace(3) %shared, "
"""What a thread of a kernel gets besides its parameters."""


def coroutines(signature: Signature, *, checked: bool = False) -> str:
    """The entry of a kernel whose threads wait for one another: every thread a coroutine, resumed in turn.

    A simdgroup's operation runs when all of its threads stand somewhere, for those that stand at the earliest call in
    the kernel's order: the others left that branch, or went past it. A barrier opens when no simdgroup can go on.
    """
    body = _THREADS.format(
        states_at=STATES_AT, handles_at=HANDLES_AT, given_at=GIVEN_AT, results_at=RESULTS_AT, frames_at=FRAMES_AT,
        frames_end=ARENA_BYTES - FRAME_BYTES, simdgroup_bytes=32 * SLOT_BYTES, context=CONTEXT,
        values=parameters.values(signature), arguments=_arguments(signature, checked),
    )  # fmt: skip
    head = _begin(signature, checked).replace("entry:", "entry:\n  %top = alloca ptr")
    phases = _PHASES.format(slot=SLOT_BYTES, barrier=BARRIER)
    return _HEAD + head + body + _EPILOGUE + "}\n" + _DECLARED + phases


def _begin(signature: Signature, checked: bool) -> str:
    pointers = parameters.pointers(signature)
    return prologue().format(pointers=f"{pointers}\n{checks.READ}" if checked else pointers)


def _arguments(signature: Signature, checked: bool) -> str:
    return (checks.PASSED if checked else "") + parameters.arguments(signature)


_DECLARED = "declare i32 @llvm.umin.i32(i32, i32)\n"
