"""PyTorch's own Metal kernels, off the Mac: read from a release's macOS wheel, compiled for this CPU and launched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError

if TYPE_CHECKING:
    from hf_mps.kernels.rules import Dispatch

_dispatch: Dispatch | None = None


def enable(release: str, device: Any, *, checked: bool = False) -> None:
    """Have the simulated device compute with a fetched release's kernels, wherever a rule covers a call. Once.

    `device` is the simulated device's extension. Raises UserError, with the next command, where the release was not
    fetched, llvmlite is not installed, this torch gives no kernels out (before 2.9), or another release is enabled.
    """
    global _dispatch
    import torch

    from hf_mps.kernels import launch
    from hf_mps.kernels.ledger import Ledger
    from hf_mps.kernels.release import Release
    from hf_mps.kernels.rules import RULES, Dispatch

    if not hasattr(torch.library, "get_kernel"):
        raise UserError(f"HF_MPS_KERNELS needs torch 2.9 or later; {torch.__version__} gives no kernel out")
    opened = Release(release, checked=checked)
    if _dispatch is not None:
        if _dispatch.release.version != opened.version:
            raise UserError(f"the kernels of torch {_dispatch.release.version} run already; start a new process")
        return
    launch.load()
    _dispatch = Dispatch(opened, Ledger(), device)
    _dispatch.install(RULES)
    device.name_launches(True)


def running() -> Dispatch | None:
    """The rules that are in front of the simulated device's kernels, with their ledger of what ran; or None."""
    return _dispatch


def disable() -> None:
    """Have the simulated device compute as without kernels again; nothing where none are enabled."""
    global _dispatch
    if _dispatch is not None:
        _dispatch.remove()
        _dispatch.device.name_launches(False)
        _dispatch = None


def say_coverage() -> None:
    """One line on stderr: how much of what a Mac runs with Metal kernels ran with the release's."""
    from hf_mps.kernels.coverage import coverage

    if _dispatch is not None and (_dispatch.ledger.operators or _dispatch.ledger.reasons):
        print(f"hf-mps: {coverage(_dispatch)}", file=sys.stderr)
