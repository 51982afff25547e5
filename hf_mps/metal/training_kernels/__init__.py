"""Metal kernels for training that PyTorch does not have: a source each, a module that launches it, and a trial.

Imports only core, metal and torch. Each kernel is written once, in Metal, and runs wherever `torch.mps.compile_shader`
does: on a Mac, and on the simulated device. Nobody calls one whose trial on this machine was not won (trial.py).
"""
