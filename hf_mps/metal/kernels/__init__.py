"""PyTorch's own Metal kernels, off the Mac: read from a release's macOS wheel, compiled for this CPU and launched."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

from hf_mps.core import settings
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError

if TYPE_CHECKING:
    from hf_mps.metal.kernels.coverage import Counting
    from hf_mps.metal.kernels.rules import Dispatch

VARIABLE = "HF_MPS_KERNELS"
_dispatch: Dispatch | None = None


def requested() -> tuple[str, bool] | None:
    """Return the release that HF_MPS_KERNELS asks for and whether its accesses are checked, fit to be enabled; or None.

    Raises UserError, which begins with the variable, where `check` does and for a value that is not understood.
    """
    asked = settings.kernels()
    if asked is not None:
        try:
            check(asked[0])
        except UserError as error:
            raise UserError(f"{VARIABLE}={os.environ[VARIABLE].strip()}: {error}") from error
    return asked


def check(release: str) -> None:
    """Refuse what `enable` would, before there is a device. Raises UserError; imports no torch."""
    from hf_mps.metal.kernels import metallib, store

    metallib.require()
    if store.canonical(release).startswith(store.MLX):
        raise UserError(
            f"{release} has MLX's kernels, which are no operators of PyTorch; next: torch.mps.load_metallib"
        )
    store.verify(release)


def enable(release: str, device: Any, *, checked: bool = False) -> None:
    """Have the simulated device compute with a fetched release's kernels, wherever a rule covers a call. Once.

    `device` is the simulated device's extension. Raises UserError, with the next command, where the release was not
    fetched, llvmlite is not installed, or another release is enabled.
    """
    global _dispatch
    from hf_mps.metal.kernels import launch
    from hf_mps.metal.kernels.release import Release
    from hf_mps.metal.kernels.rules import Dispatch

    opened = Release(release, checked=checked)
    if _dispatch is not None:
        present = _dispatch.release
        if (present.version, present.checked) != (opened.version, opened.checked):
            how = ", checked," if present.checked else ""
            raise UserError(f"the kernels of torch {present.version}{how} run already; start a new process")
        return
    # Before the rules are installed: the files declare theirs when they are imported.
    launch.load()
    _dispatch = Dispatch(opened, device)
    _dispatch.install()
    device.name_launches(True)


def running() -> Dispatch | None:
    """Return the rules that are in front of the simulated device's kernels, with their ledger of what ran; or None."""
    return _dispatch


def disable() -> None:
    """Have the simulated device compute as without kernels again; nothing where none are enabled."""
    global _dispatch
    if _dispatch is not None:
        _dispatch.remove()
        _dispatch.device.name_launches(False)
        _dispatch = None


def counting() -> Counting | None:
    """Count what runs from now on; None where no kernels are enabled."""
    from hf_mps.metal.kernels.coverage import Counting

    return None if _dispatch is None else Counting(_dispatch)


def told(device: Choice[str]) -> Choice[str]:
    """Return the device of a run, whose reason also says that a release's kernels compute on it, where they do."""
    if _dispatch is None or device.value != "mps":
        return device
    checked = ", each access bounded" if _dispatch.release.checked else ""
    release = _dispatch.release.version
    return Choice(device.value, f"{device.reason}; computing with torch {release}'s own Metal kernels{checked}")


def coverage_is_said() -> None:
    """Say no coverage when the process ends: a report has it."""
    atexit.unregister(say_coverage)


def say_coverage() -> None:
    """One line on stderr: how much of what a Mac runs with Metal kernels ran with the release's."""
    from hf_mps.metal.kernels.coverage import Counts, covered

    if _dispatch is not None and (_dispatch.ledger.operators or _dispatch.ledger.reasons):
        print(f"hf-mps: {covered(Counts.of(_dispatch), _dispatch.release.version)}", file=sys.stderr)
