; @stand puts a group's threads at the kernel's beginning, and writes their positions where the last group had others.
; @opened opens a barrier; it tells whether a thread is still on its way.
define internal void @stand(ptr %states, ptr %positions, i32 %x, i32 %y, i32 %count) nounwind {
begin:
  %key.at = getelementptr i32, ptr %positions, i64 $known
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
  %y.at = getelementptr i32, ptr %x.at, i64 $lanes
  store i32 %lidy, ptr %y.at
  %z.at = getelementptr i32, ptr %y.at, i64 $lanes
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
  %gone = icmp uge <32 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7, i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15, i32 16, i32 17, i32 18, i32 19, i32 20, i32 21, i32 22, i32 23, i32 24, i32 25, i32 26, i32 27, i32 28, i32 29, i32 30, i32 31>, %lefts
  %state = sext <32 x i1> %gone to <32 x i32>
  %state.at = getelementptr i32, ptr %states, i64 %base.w
  store <32 x i32> %state, ptr %state.at, align 64
  %base.next = add nuw i32 %base, 32
  %stand.more = icmp ult i32 %base.next, %count
  br i1 %stand.more, label %stand, label %over
over:
  ret void
}
define internal i1 @opened(ptr %states, i32 %count) nounwind {
begin:
  br label %simdgroup
simdgroup:
  %base = phi i32 [ 0, %begin ], [ %base.next, %simdgroup ]
  %any = phi i1 [ false, %begin ], [ %any.next, %simdgroup ]
  %base.w = zext i32 %base to i64
  %at = getelementptr i32, ptr %states, i64 %base.w
  %state = load <32 x i32>, ptr %at, align 64
  %waits = icmp ne <32 x i32> %state, splat (i32 $done)
  %open = and <32 x i32> %state, splat (i32 $mask)
  %next = select <32 x i1> %waits, <32 x i32> %open, <32 x i32> %state
  store <32 x i32> %next, ptr %at, align 64
  %here = call i1 @llvm.vector.reduce.or.v32i1(<32 x i1> %waits)
  %any.next = or i1 %any, %here
  %base.next = add nuw i32 %base, 32
  %more = icmp ult i32 %base.next, %count
  br i1 %more, label %simdgroup, label %over
over:
  ret i1 %any.next
}
declare i32 @llvm.vector.reduce.umin.v32i32(<32 x i32>)
declare i1 @llvm.vector.reduce.or.v32i1(<32 x i1>)
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.ctpop.i32(i32)
