"""PyTorch's "torch.backends" entry point: called at the end of every `import torch`."""

from __future__ import annotations

import os


def start() -> None:
    """Switch the layer on unless HF_MPS=0, which loads nothing more; whatever fails ends in one warning."""
    if os.environ.get("HF_MPS") != "0":
        from hf_mps.layer.activation import activate

        activate.start()
