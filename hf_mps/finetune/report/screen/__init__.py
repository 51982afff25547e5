"""What a person sees while a run goes on: a header of choices, dense step lines, a closing table.

`StepLines` needs transformers and is imported on first use, so that a plan can print its header without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_mps.finetune.report.screen.tables import comparison, final_table, header, note

if TYPE_CHECKING:
    from hf_mps.finetune.report.screen.steps import StepLines

__all__ = ["StepLines", "comparison", "final_table", "header", "note"]


def __getattr__(name: str) -> Any:
    if name == "StepLines":
        from hf_mps.finetune.report.screen.steps import StepLines

        return StepLines
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
