"""hf_mps: Hugging Face training on a Mac's GPU, correct, fast and effortless.

Importing this package must not import torch: PyTorch's own start-up loads `hf_mps.autoload` from here.
"""

__version__ = "0.1.0"
