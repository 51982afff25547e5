; The first %count lanes go on from one place, one after the other.
turn.$place:
  %lane = phi i32 [ 0, %turns ], [ %next, %turn.$place ]
$thread
  $call alwaysinline
  %next = add nuw i32 %lane, 1
  %more = icmp ult i32 %next, %count
  br i1 %more, label %turn.$place, label %earliest
