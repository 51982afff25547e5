; A run of threadgroups: the grid is read, each group's position and size are worked out, and $group runs it.
define dso_local i32 @entry(ptr %args, ptr %grid, i64 %first, i64 %last, ptr %arena) nounwind {
entry:
  %threadsx.at = getelementptr i32, ptr %grid, i64 0
  %threadsx = load i32, ptr %threadsx.at
  %threadsy.at = getelementptr i32, ptr %grid, i64 1
  %threadsy = load i32, ptr %threadsy.at
  %threadsz.at = getelementptr i32, ptr %grid, i64 2
  %threadsz = load i32, ptr %threadsz.at
  %fullx.at = getelementptr i32, ptr %grid, i64 3
  %fullx = load i32, ptr %fullx.at
  %fully.at = getelementptr i32, ptr %grid, i64 4
  %fully = load i32, ptr %fully.at
  %fullz.at = getelementptr i32, ptr %grid, i64 5
  %fullz = load i32, ptr %fullz.at
  %groupsx.at = getelementptr i32, ptr %grid, i64 6
  %groupsx = load i32, ptr %groupsx.at
  %groupsy.at = getelementptr i32, ptr %grid, i64 7
  %groupsy = load i32, ptr %groupsy.at
  %groupsz.at = getelementptr i32, ptr %grid, i64 8
  %groupsz = load i32, ptr %groupsz.at
  %shared = addrspacecast ptr %arena to ptr addrspace(3)
  %wide.x = zext i32 %groupsx to i64
  %wide.y = zext i32 %groupsy to i64
  %wide.xy = mul i64 %wide.x, %wide.y
$pointers
  %any = icmp ult i64 %first, %last
  br i1 %any, label %group, label %finished
group:
  %g = phi i64 [ %first, %entry ], [ %g.next, %group.end ]
  %gz.w = udiv i64 %g, %wide.xy
  %rest = urem i64 %g, %wide.xy
  %gy.w = udiv i64 %rest, %wide.x
  %gx.w = urem i64 %rest, %wide.x
  %groupx = trunc i64 %gx.w to i32
  %startx = mul i32 %groupx, %fullx
  %leftx = sub i32 %threadsx, %startx
  %sizex = call i32 @llvm.umin.i32(i32 %leftx, i32 %fullx)
  %groupy = trunc i64 %gy.w to i32
  %starty = mul i32 %groupy, %fully
  %lefty = sub i32 %threadsy, %starty
  %sizey = call i32 @llvm.umin.i32(i32 %lefty, i32 %fully)
  %groupz = trunc i64 %gz.w to i32
  %startz = mul i32 %groupz, %fullz
  %leftz = sub i32 %threadsz, %startz
  %sizez = call i32 @llvm.umin.i32(i32 %leftz, i32 %fullz)
  %size.xy = mul i32 %sizex, %sizey
  %size.all = mul i32 %size.xy, %sizez
  %size.up = add i32 %size.all, 31
  %simdgroups = lshr i32 %size.up, 5
  %quads.up = add i32 %size.all, 3
  %quadgroups = lshr i32 %quads.up, 2
  %full.xy = mul i32 %fullx, %fully
  %full.all = mul i32 %full.xy, %fullz
  %full.up = add i32 %full.all, 31
  %full.simdgroups = lshr i32 %full.up, 5
  %full.quads.up = add i32 %full.all, 3
  %full.quadgroups = lshr i32 %full.quads.up, 2
$group
group.end:
  %g.next = add nuw i64 %g, 1
  %more = icmp ult i64 %g.next, %last
  br i1 %more, label %group, label %finished
finished:
  ret i32 0
}
declare i32 @llvm.umin.i32(i32, i32)
