"""transformers puts a second module object in its own place when processing_utils is imported: the names go there too.

Source: `direct_transformers_import` in transformers/utils/import_utils.py (5.0 to 5.23). Needless where the object is
still the first, which has the names.
"""

from __future__ import annotations

import sys
from types import ModuleType

from hf_mps.compat import names, optimizer


def apply(processing_utils: ModuleType) -> None:
    """Apply the shims for `transformers` to what stands under that name now."""
    transformers = sys.modules["transformers"]
    names.apply(transformers)
    optimizer.apply(transformers)
