"""`hf-mps kernels report`: every kernel that a launch rule reaches, against float64 on the CPU."""
