; What one call of a place gives becomes what a later one takes, lane by lane.
define internal void $name(ptr %from, ptr %to) alwaysinline nounwind {
entry:
  br label %lane
lane:
  %i = phi i64 [ 0, %entry ], [ %next, %lane ]
  %source = getelementptr $kind, ptr %from, i64 %i
  %value = load $kind, ptr %source
  %target = getelementptr $struct, ptr %to, i64 %i, i32 $position
  store $kind %value, ptr %target
  %next = add nuw i64 %i, 1
  %more = icmp ult i64 %next, 32
  br i1 %more, label %lane, label %done
done:
  ret void
}
