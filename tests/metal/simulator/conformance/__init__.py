"""PyTorch's own operator samples (OpInfo) on the simulated device against the CPU.

samples.py makes the arguments, compare.py runs one call on both devices and says how they differ, worker.py does that
for the operators it is told, runner.py spreads the operators over the cores and sums up. A Mac is no part of this: the
CPU is the reference, because the simulated device computes with the CPU's kernels.
"""
