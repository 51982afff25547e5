"""What the user is told about fallbacks: warnings at the first line of the user's own code, and tables on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_mps.core.notices import user_line

if TYPE_CHECKING:
    from hf_mps.fallback.accounting import Report

TRACKER = "https://github.com/pytorch/pytorch/issues/141287"

_said: set[str] = set()
_silent = False


class MetalFallbackWarning(UserWarning):
    """An operator without a Metal kernel ran on the CPU."""


def silence(silent: bool) -> None:
    """Say nothing from now on (mode quiet), or speak."""
    global _silent
    _silent = silent


def operator(name: str, values: tuple[Any, ...]) -> None:
    """Warn that an operator runs on the CPU, once for each operator: its name, its tensors, and who asked for it."""
    _warn(
        name,
        f"{name}{_shapes(values)} has no Metal kernel and runs on the CPU, as often as it is called; "
        f"each call waits for the GPU. Missing operators are tracked in {TRACKER}",
    )


def rescued(name: str, values: tuple[Any, ...], reason: str) -> None:
    """Warn that an operator's Metal kernel refused a call, which the CPU took; once for each operator."""
    _warn(f"{name} rescued", f"{name}{_shapes(values)} was refused on Metal ({reason}) and runs on the CPU: rescue")


def single(name: str) -> None:
    """Warn, once, that a float64 result became float32."""
    _warn("float64", f"{name} gave float64 on the CPU, which Metal does not have: the result is float32")


def share(part: float, wall: float, limit: float) -> None:
    """Warn, once, that fallbacks take a large share of the time."""
    _warn(
        "share",
        f"operators without a Metal kernel took {part:.0%} of the last {wall:.1f} s{_label()}, more than {limit:.0%} "
        "(HF_MPS_FALLBACK_SHARE); hf_mps.fallback.report() names them",
    )


def say(text: str) -> None:
    """Print a table on stderr, if there is one and the mode is not quiet."""
    if text and not _silent:
        print(text, file=sys.stderr, flush=True)


def forget() -> None:
    """Let everything be said once more."""
    _said.clear()


def table(report: Report) -> str:
    """The report in lines of at most 100 characters: one for each operator under a line that sums them up."""
    many = len(report.operators)
    lines = [
        f"hf-mps: {many} operator{'s' * (many > 1)} without a Metal kernel ran on the CPU: "
        f"{report.seconds:.2f} s of {report.wall:.1f} s ({report.share:.1%}{_label()})"
    ]
    width = max(8, *(len(entry.operator) for entry in report.operators))
    lines.append(f"  {'operator':<{width}}  {'calls':>8}  {'seconds':>8}  {'share':>6}  {'copied':>9}  way")
    for entry in report.operators:
        lines.append(
            f"  {entry.operator:<{width}}  {entry.calls:>8}  {entry.seconds:>8.3f}  {entry.share:>6.1%}"
            f"  {_size(entry.bytes):>9}  {entry.way}"
        )
    lines.append("  not in these seconds: at each call the GPU runs out of work, as nothing is queued meanwhile")
    return "\n".join(lines)


def _label() -> str:
    from hf_mps.device import simulated

    return ", simulated" if simulated() else ""


def _warn(key: str, text: str) -> None:
    if key in _said or _silent:
        return
    _said.add(key)
    where = user_line()
    # Raised here, before the operator runs, where the program turns warnings into errors.
    warnings.warn_explicit(f"hf_mps: {text}", MetalFallbackWarning, *(where or ("<unknown>", 1)))


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


def _size(count: int) -> str:
    """Bytes in words, in powers of 1000: "12.3 MB"."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
