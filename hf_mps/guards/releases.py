"""Which release of torch is installed, as guards compare it."""

from __future__ import annotations


def torch_release() -> tuple[int, ...]:
    """The release as numbers, (2, 13, 0), whatever follows them in the version's text."""
    import torch
    from packaging.version import Version

    return Version(str(torch.__version__)).release
