; A group whose threads wait for one another: round after round until all are at the end. In a round each simdgroup's
; lanes at the earliest place do its operation and go on, until all of them are at a barrier or at the end.
  %simdgroups.w = zext i32 %simdgroups to i64
  %frame.end = getelementptr %hf.frame.type, ptr null, i64 %simdgroups.w
  %frame.bytes = ptrtoint ptr %frame.end to i64
  %fits = icmp ule i64 %frame.bytes, $room
  br i1 %fits, label %stand, label %full
full:
  ret i32 1
stand:
  %states = getelementptr i8, ptr %arena, i64 $states
  %positions = getelementptr i8, ptr %arena, i64 $positions
  %given = getelementptr i8, ptr %arena, i64 $given
  %results = getelementptr i8, ptr %arena, i64 $results
  %frames = getelementptr i8, ptr %arena, i64 $frames
  call void @stand(ptr %states, ptr %positions, i32 %sizex, i32 %sizey, i32 %size.all)
  br label %round
round:
  br label %simdgroup
simdgroup:
  %base = phi i32 [ 0, %round ], [ %base.next, %simdgroup.end ]
  %base.w = zext i32 %base to i64
  %lane.states = getelementptr i32, ptr %states, i64 %base.w
  %number.w = lshr exact i64 %base.w, 5
  %slots = mul i64 %number.w, $slots
  %lane.given = getelementptr i8, ptr %given, i64 %slots
  %lane.results = getelementptr i8, ptr %results, i64 %slots
  %lane.frame = getelementptr %hf.frame.type, ptr %frames, i64 %number.w
  br label %earliest
earliest:
  %state = load <32 x i32>, ptr %lane.states, align 64
  %least = call i32 @llvm.vector.reduce.umin.v32i32(<32 x i32> %state)
  %goes = icmp ult i32 %least, $barrier
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
  switch i32 %least, label %one [ $cases ]
$turns
$one
simdgroup.end:
  %base.next = add nuw i32 %base, 32
  %base.more = icmp ult i32 %base.next, %size.all
  br i1 %base.more, label %simdgroup, label %barrier
barrier:
  %opened = call i1 @opened(ptr %states, i32 %size.all)
  br i1 %opened, label %round, label %group.end
