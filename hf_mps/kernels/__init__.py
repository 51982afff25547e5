"""PyTorch's own Metal kernels, off the Mac: read from a release's macOS wheel, compiled for this CPU and launched."""
