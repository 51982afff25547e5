"""Metal source compiled for this CPU: what `torch.mps.compile_shader` gives on the simulated device.

The source goes through clang (clang.py), with Metal's own syntax rewritten (rewrite.py) and Metal's standard library
from include/metal_stdlib, to the LLVM module that Apple's compiler would write (module.py): the same intrinsics, which
`hf_mps.metal.kernels` lowers and runs (library.py).
"""
