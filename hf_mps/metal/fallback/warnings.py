"""What the user reads about fallbacks: warnings at the first line of the user's own code, and tables on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from hf_mps.core.notices import once, user_line

TRACKER = "https://github.com/pytorch/pytorch/issues/141287"

_silent = False


class MetalFallbackWarning(UserWarning):
    """An operator without a Metal kernel ran on the CPU."""


def silence(silent: bool) -> None:
    """Say nothing from now on (mode quiet), or speak."""
    global _silent
    _silent = silent


def warn_operator(name: str, values: tuple[Any, ...]) -> None:
    """Warn that an operator runs on the CPU, once for each operator: its name, its tensors, and who asked for it."""
    _warn(
        name,
        f"{name}{_shapes(values)} has no Metal kernel and runs on the CPU, as often as it is called; "
        f"each call waits for the GPU. Missing operators are tracked in {TRACKER}",
    )


def warn_rescued(name: str, values: tuple[Any, ...], reason: str) -> None:
    """Warn that an operator's Metal kernel refused a call, which the CPU took; once for each operator."""
    _warn(f"{name} rescued", f"{name}{_shapes(values)} was refused on Metal ({reason}) and runs on the CPU: rescue")


def warn_float32(name: str) -> None:
    """Warn, once, that a float64 result became float32."""
    _warn("float64", f"{name} gave float64 on the CPU, which Metal does not have: the result is float32")


def warn_share(part: float, wall: float, limit: float) -> None:
    """Warn, once, that fallbacks take a large share of the time."""
    _warn(
        "share",
        f"operators without a Metal kernel took {part:.0%} of the last {wall:.1f} s{simulated_label()}, "
        f"more than {limit:.0%} (HF_MPS_FALLBACK_SHARE); hf_mps.fallback.report() names them",
    )


def print_table(text: str) -> None:
    """Print a table on stderr, if there is one and the mode is not quiet."""
    if text and not _silent:
        print(text, file=sys.stderr, flush=True)


def simulated_label() -> str:
    """Return ", simulated" where the Metal device is, for a line of figures, else nothing."""
    from hf_mps.metal.device import simulated

    return ", simulated" if simulated() else ""


def _warn(key: str, text: str) -> None:
    if _silent or not once(key):
        return
    # Raised here, before the operator runs, where the program turns warnings into errors.
    warnings.warn_explicit(f"hf_mps: {text}", MetalFallbackWarning, *(user_line() or ("<unknown>", 1)))


def _shapes(values: tuple[Any, ...]) -> str:
    """Dtypes and shapes of the tensors in words: " of float32[4, 10], int64[4]"."""
    shown = list(_tensors(values))
    words = ", ".join(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in shown[:4])
    if not words:
        return ""
    return f" of {words}{', …' if len(shown) > 4 else ''}"


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            yield value
