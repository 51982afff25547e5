"""Which classes and functions of transformers do what a kernel of a known name does.

transformers marks them with `@use_kernel_forward_from_hub("RMSNorm")`, so that a kernel from the hub may compute them
(transformers/integrations/hub_kernels.py). Without the package kernels the mark leaves nothing but its source text.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

MODELS = "transformers.models."


@functools.cache
def marked(function_or_class: Any, kernel: str) -> bool:
    """Return whether transformers says that the kernel of that name computes a class of layers, or a function."""
    if not getattr(function_or_class, "__module__", "").startswith(MODELS):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(function_or_class))
    except (OSError, TypeError):  # no source file, or none of its own
        return False
    return f'@use_kernel_forward_from_hub("{kernel}")' in source
