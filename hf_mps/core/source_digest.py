"""A digest of the code behind a function: what a cache of its results has to be keyed by.

`datasets.fingerprint.Hasher` cannot serve. It pickles an imported function by its name, so a helper may change and the
hash does not, and it pickles what a closure holds, rows and their paths included.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def digest(function: Callable[..., Any]) -> str:
    """Hash a function's name and every source file of its package; not the values that it closes over or is given.

    Those the caller's key has to name. The digest is the same in every process and wherever the package lies.
    """
    inner: Any = function.func if isinstance(function, functools.partial) else function
    # All files, and not only those that the function reaches: a cache that is made anew after an upgrade costs
    # minutes, and one that is wrong a training. It takes some hundredths of a second.
    content = hashlib.sha256(f"{inner.__module__}.{inner.__qualname__}".encode())
    for folder in map(Path, getattr(sys.modules[inner.__module__.partition(".")[0]], "__path__", ())):
        for path in sorted(folder.rglob("*.py")):
            content.update(path.relative_to(folder).as_posix().encode())
            content.update(path.read_bytes())
    return content.hexdigest()[:32]
