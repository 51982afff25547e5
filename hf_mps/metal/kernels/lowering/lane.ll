; Where a lane of the simdgroup at %base is, by the positions that @stand wrote.
  %lane.w = zext i32 %lane to i64
  %linear = add nuw i32 %base, %lane
  %linear.w = zext i32 %linear to i64
  %state = getelementptr i32, ptr %lane.states, i64 %lane.w
  %lidx.at = getelementptr i32, ptr %positions, i64 %linear.w
  %lidx = load i32, ptr %lidx.at
  %lidy.at = getelementptr i32, ptr %lidx.at, i64 $lanes
  %lidy = load i32, ptr %lidy.at
  %lidz.at = getelementptr i32, ptr %lidy.at, i64 $lanes
  %lidz = load i32, ptr %lidz.at
  %posx = add nuw i32 %startx, %lidx
  %posy = add nuw i32 %starty, %lidy
  %posz = add nuw i32 %startz, %lidz
  %simdgroup = lshr i32 %linear, 5
  %quadgroup = lshr i32 %linear, 2
  %quad.lane = and i32 %linear, 3
