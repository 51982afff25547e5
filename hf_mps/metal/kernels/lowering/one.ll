; The lanes of %mask go on one by one, wherever they are in the simdgroup.
one:
  %remaining = phi i32 [ %mask, %turns ], [ %mask, %operate ], [ %next, %one ]
  %lane = call i32 @llvm.cttz.i32(i32 %remaining, i1 true)
$thread
  $call noinline
  %less = sub i32 %remaining, 1
  %next = and i32 %remaining, %less
  %more = icmp ne i32 %next, 0
  br i1 %more, label %one, label %earliest
