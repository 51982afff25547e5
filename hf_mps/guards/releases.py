"""Which release of torch is installed, as guards compare it."""

from __future__ import annotations

import functools


def torch_release() -> tuple[int, ...]:
    """The release as numbers, (2, 13, 0), whatever follows them in the version's text."""
    import torch

    return _numbers(str(torch.__version__))


@functools.cache
def _numbers(version: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(version).release
