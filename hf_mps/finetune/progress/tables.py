"""The header before a run and the table after it: boxed on a terminal, plain aligned lines otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO


def header(rows: Iterable[tuple[str, Any, str]], *, title: str = "hf_mps", stream: TextIO | None = None) -> None:
    """Print what a run has decided: each row is a name, its value and the reason (may be empty). Default: stdout."""
    raise NotImplementedError


def final_table(
    metrics: Mapping[str, float],
    *,
    baseline: Mapping[str, float] | None = None,
    baseline_is: str = "",
    seconds: float | None = None,
    samples_per_second: float | None = None,
    peak_memory: int | None = None,
    files: Sequence[Path] = (),
    stream: TextIO | None = None,
) -> None:
    """Print how a run ended: metrics against the baseline, training seconds, samples/s, peak bytes, files."""
    raise NotImplementedError
