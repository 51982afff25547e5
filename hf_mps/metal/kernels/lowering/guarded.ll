; As many ordinary threads as the last one's place: they are the row's first, and run in a loop of their own.
  br label %scan
$scan
scanned:
  %in.front = icmp eq i32 %scan.count.next, %scan.last.next
  %clear.size = select i1 %in.front, i32 %scan.count.next, i32 0
  %clear.any = icmp ne i32 %clear.size, 0
  br i1 %clear.any, label %clear, label %others
$clear
others:
  %others.any = icmp ult i32 %clear.size, %sizex
  br i1 %others.any, label %x, label %y.end
$others
