"""Operators without a Metal kernel run on the CPU: on by itself, named, counted, and without copies where it can be.

Importing this package does not import torch.
"""

from __future__ import annotations

import atexit
from time import perf_counter

from hf_mps.core.choice import Choice
from hf_mps.metal.fallback.accounting import Entry, MetalFallbackWarning, Report, ledger, monitor, silence

__all__ = [
    "Entry",
    "MetalFallbackWarning",
    "Report",
    "mark_reported",
    "mode",
    "refused",
    "registered",
    "report",
    "reset",
    "start",
]

_mode: Choice[str] | None = None


def start() -> Choice[str]:
    """Register the CPU's kernels as HF_MPS_FALLBACK says (warn, quiet, error or rescue) and return the mode.

    Called by `hf_mps.layer.activation.activate` where there is Metal; a second call changes nothing. Raises UserError
    for a value of HF_MPS_FALLBACK, HF_MPS_FALLBACK_SHARE or PYTORCH_ENABLE_MPS_FALLBACK that nobody knows.
    """
    global _mode
    if _mode is not None:
        return _mode

    from hf_mps.core import settings

    chosen, limit = settings.fallback(), settings.fallback_share()
    if chosen.value != "error":
        from hf_mps.metal.fallback import registration

        silence(chosen.value == "quiet")
        registration.start()
        if chosen.value == "rescue":
            from hf_mps.metal.fallback import rescue

            rescue.start()
        registration.watch()
        monitor.limit = limit
        monitor.restart(perf_counter())
        atexit.register(ledger.print_report)
    _mode = chosen
    return chosen


def mode() -> Choice[str] | None:
    """Return the mode that is on, with the reason, or None where the layer has not switched fallbacks on."""
    return _mode


def report() -> Report:
    """What ran on the CPU since the layer was switched on (or since `reset`): print it, or read its `operators`."""
    return ledger.report()


mark_reported = ledger.mark_reported
"""Print no table at the end of the process of what fell back up to now: the caller has reported it."""


def reset() -> None:
    """Let the report begin anew."""
    ledger.reset()
    monitor.restart(perf_counter())


def registered() -> list[str]:
    """Return the operators without a Metal kernel that run on the CPU; empty where fallbacks are off."""
    if _mode is None or _mode.value == "error":
        return []
    from hf_mps.metal.fallback import registration

    return registration.registered()


def refused() -> dict[str, str]:
    """Return the operators without a Metal kernel that keep Metal's error, each with the reason."""
    if _mode is None or _mode.value == "error":
        return {}
    from hf_mps.metal.fallback import registration

    return registration.refused()
