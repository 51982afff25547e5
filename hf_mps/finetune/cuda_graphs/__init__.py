"""CUDA graphs of training steps: recorded once for each shape of a batch, replayed by a single launch."""
