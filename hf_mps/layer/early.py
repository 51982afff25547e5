"""The one part of the layer that is needed before torch: names that left a library which a script imports first.

Every example of transformers 4.0 to 4.22 has `from datasets import load_metric` above `import torch`, where PyTorch's
entry point has not called anything yet. hf_mps_early.pth, which the wheel puts beside this package, has Python import
_hf_mps_early when it starts: a finder waits for `import datasets` and then calls `find`. Nothing else happens before
torch, and nothing at all with HF_MPS=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0. Where Python reads no such file (-S,
`pip install --target`), `hf-mps run script.py` does the same. Python 3.18 will want a .start file (PEP 829).
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

# Their shims need no torch, which a program that only reads data would wait for.
NAMES = ("datasets",)


def find(finder: Any, name: str) -> ModuleSpec | None:
    """Take the waiting finder away, watch for NAMES, and return the spec of `name` that is then found."""
    sys.meta_path.remove(finder)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from hf_mps.layer import integrations
        from hf_mps.layer.activation.activate import enabled

        if enabled():
            integrations.start(NAMES)
    return find_spec(name)
