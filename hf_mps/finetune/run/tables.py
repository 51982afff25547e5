"""What a run prints of itself: its decisions before it trains, and how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_mps.finetune.recipe import expect, training_section
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.report import screen
from hf_mps.metal import fallback, kernels

if TYPE_CHECKING:
    from hf_mps.finetune.features.base import Plan
    from hf_mps.finetune.report import RunRecord

# Names that would make the header's first column wider than all others do.
SHORT_NAMES = {"logging_nan_inf_filter": "NaN filter"}


def header(resolved: ResolvedRecipe, plan: Plan, verb: str = "finetune") -> None:
    """Print the decisions, each with its reason."""
    words = {"True": "on", "False": "off"}
    rows = []
    for name, choice in plan.shown().items():
        value = str(choice.value)
        rows.append((SHORT_NAMES.get(name, name.replace("_", " ")), words.get(value, value), choice.reason))
    if (recipe := resolved.recipe).expect:
        rows.append(("expected", expect.ranges(recipe), expect.applies(recipe, resolved.changed).reason))
    screen.header(rows, title=f"hf_mps {verb} {resolved.name}")


def closing_table(resolved: ResolvedRecipe, record: RunRecord, files: Sequence[Path]) -> None:
    """Print how the run ended, its folder and the files in it, and the command that uploads it to the hub."""
    notes = [("device", "simulated: time and memory say nothing about a Mac")] if record.simulated else []
    if (stream := record.stream) is not None:
        waited = f"{stream['waited_seconds']:.1f} s, {stream['waited_share']:.1%} of the training"
        broken = f"; {stream['rows_broken']:,} broken ones skipped" if stream["rows_broken"] else ""
        notes.append(("waited", f"{waited}, for batches; {stream['rows_read']:,} rows were read{broken}"))
    if record.metal_kernels is not None:
        notes.append(("kernels", str(record.metal_kernels)))
        kernels.coverage_is_said()
    if record.fallback:
        names = [entry["operator"] for entry in record.fallback]
        needed = [name for name in names if name not in record.unexpected_fallback]
        notes += [("on the CPU", f"{', '.join(needed)}, as the recipe names them")] if needed else []
        notes += [("unexpected", f"{', '.join(record.unexpected_fallback)} ran on the CPU")] if needed != names else []
        fallback.mark_reported()
    if resolved.smoke is None:
        notes.append(("to share", training_section.PUSH.format(shlex.quote(str(files[0])))))
    else:
        from hf_mps.finetune.smoke import files_stay

        files = files if files_stay(resolved) else ()
    screen.final_table(
        record.metrics,
        baseline=record.baseline.metrics if record.baseline else None,
        baseline_is=record.baseline.what if record.baseline else "",
        expectation=record.expectation,
        seconds=record.train_seconds,
        samples_per_second=record.samples_per_second,
        peak_memory=record.peak_memory,
        notes=notes,
        files=files,
    )
