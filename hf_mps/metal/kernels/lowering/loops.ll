; A group whose threads never wait for one another: plain loops over z, y and, in $row, x.
  br label %z
z:
  %lidz = phi i32 [ 0, %group ], [ %lidz.next, %z.end ]
  br label %y
y:
  %lidy = phi i32 [ 0, %z ], [ %lidy.next, %y.end ]
$row
y.end:
  %lidy.next = add nuw nsw i32 %lidy, 1
  %y.more = icmp ult i32 %lidy.next, %sizey
  br i1 %y.more, label %y, label %z.end
z.end:
  %lidz.next = add nuw nsw i32 %lidz, 1
  %z.more = icmp ult i32 %lidz.next, %sizez
  br i1 %z.more, label %z, label %group.end
