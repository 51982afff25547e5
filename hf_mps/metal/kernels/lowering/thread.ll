; Where a thread of those loops is. The sums are unsigned and cannot wrap, as a grid has fewer than 2^32 threads in a
; dimension: LLVM vectorises on that.
  %posx = add nuw i32 %startx, %lidx
  %posy = add nuw i32 %starty, %lidy
  %posz = add nuw i32 %startz, %lidz
  %row = mul i32 %lidz, %sizey
  %row.y = add i32 %row, %lidy
  %row.x = mul i32 %row.y, %sizex
  %linear = add i32 %row.x, %lidx
  %lane = and i32 %linear, 31
  %simdgroup = lshr i32 %linear, 5
  %quadgroup = lshr i32 %linear, 2
  %quad.lane = and i32 %linear, 3
