"""transformers puts a second module object in its own place when processing_utils is imported: the names go there too.

Source: `direct_transformers_import` in transformers/utils/import_utils.py (5.0 to 5.23). Needless where the object is
still the first, which has the names.
"""

from __future__ import annotations

from hf_mps.core.patching import Put
from hf_mps.layer.compat import names, optimizer

AFTER = "transformers.processing_utils"
patches = {
    "transformers:__getattr__": names.Finder("__getattr__", own=True, optional=True, after=AFTER),
    "transformers:AdamW": Put(optimizer.patches["transformers:AdamW"].method, optional=True, after=AFTER),
}
