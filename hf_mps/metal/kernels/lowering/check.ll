; Whether an access is inside one of the buffers that it may be meant for: its address, or the note's spare place.
define internal ptr @hf.check(ptr %p, i64 %bytes, i64 %mask, $given) noinline nounwind {
begin:
  %at = ptrtoint ptr %p to i64
  %end = add i64 %at, %bytes
  %count = load i64, ptr %hf.ranges
  br label %look
look:
  %i = phi i64 [ 0, %begin ], [ %next, %other ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %compare, label %outside
compare:
  %three = mul i64 %i, 3
  %first = add i64 %three, 1
  %start.at = getelementptr i64, ptr %hf.ranges, i64 %first
  %start = load i64, ptr %start.at
  %end.at = getelementptr i64, ptr %start.at, i64 1
  %stop = load i64, ptr %end.at
  %location.at = getelementptr i64, ptr %start.at, i64 2
  %location = load i64, ptr %location.at
  %shifted = lshr i64 %mask, %location
  %bit = and i64 %shifted, 1
  %meant = icmp ne i64 %bit, 0
  %low = icmp uge i64 %at, %start
  %high = icmp ule i64 %end, %stop
  %inside.both = and i1 %low, %high
  %inside = and i1 %inside.both, %meant
  br i1 %inside, label %good, label %other
other:
  %next = add i64 %i, 1
  br label %look
good:
  ret ptr %p
outside:
  %before = atomicrmw add ptr %hf.fault, i64 1 monotonic
  %is.first = icmp eq i64 %before, 0
  br i1 %is.first, label %note, label %spare
note:
  %note.1 = getelementptr i64, ptr %hf.fault, i64 1
  store i64 %hf.group, ptr %note.1
  %note.2 = getelementptr i64, ptr %hf.fault, i64 2
  %thread = zext i32 %hf.linear to i64
  store i64 %thread, ptr %note.2
  %note.3 = getelementptr i64, ptr %hf.fault, i64 3
  store i64 %at, ptr %note.3
  %note.4 = getelementptr i64, ptr %hf.fault, i64 4
  store i64 %bytes, ptr %note.4
  %note.5 = getelementptr i64, ptr %hf.fault, i64 5
  store i64 %mask, ptr %note.5
  br label %spare
spare:
  %somewhere = getelementptr i64, ptr %hf.fault, i64 $words
  ret ptr %somewhere
}
