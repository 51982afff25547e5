"""Waits for `import datasets`; Python runs this file whenever it starts, by hf_mps_early.pth beside it.

The wheel puts both next to the package, in site-packages. Old scripts import `load_metric` from datasets before torch,
and torch is what switches hf_mps on. Until somebody imports datasets, nothing of hf_mps is loaded. HF_MPS=0 switches
this off; deleting the .pth file does too, and `hf-mps run script.py` then does the same for one script.

PYTEST_DONT_REWRITE: pytest would warn in every suite that this was imported before it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing it from typing would take longer than everything else here
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class HfMpsEarly:
    """An entry of sys.meta_path that knows one name."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Hand over to hf_mps.layer.early where `name` is datasets; find nothing otherwise."""
        if name != "datasets":
            return None
        try:
            from hf_mps.layer.early import find

            return find(self, name)
        except Exception:  # a broken hf_mps must not break somebody's import
            return None


if os.environ.get("HF_MPS") != "0":
    sys.meta_path.insert(0, HfMpsEarly())
