"""memory-metrics: skip_memory_metrics=False reports a peak on Metal, instead of a TypeError."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard

_PEAK = "_hf_mps_peak"


class MemoryMetrics(Guard):
    """Samples while Trainer's own thread watches the CPU's memory, and puts the peak where Trainer has words."""

    name = "memory-metrics"
    what = (
        "skip_memory_metrics=False puts words in the place of the peak on mps, on which log_metrics ends in a TypeError"
    )
    issue = (
        "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_utils.py (TrainerMemoryTracker)"
    )
    until = "torch.mps has max_memory_allocated and the oldest supported transformers uses it"
    patches = {
        # Two methods that do not look at who called them.
        "transformers.trainer:TrainerMemoryTracker.peak_monitor_func": "_watch",
        "transformers.trainer:TrainerMemoryTracker.stop": "_stop",
    }

    def applies(self) -> Choice[bool]:
        """Whether torch has no peak for mps; transformers then has none either."""
        import torch

        if hasattr(torch.mps, "max_memory_allocated"):
            return Choice(False, "torch.mps has max_memory_allocated")
        return Choice(True, "torch.mps has no call for a peak, so it is sampled")

    def _watch(self, stock: Any, tracker: Any) -> None:
        from hf_mps.metal.device.choice import metal
        from hf_mps.metal.device.memory import Peak

        if not metal().value:
            stock(tracker)
            return
        with Peak("mps") as peak:
            setattr(tracker, _PEAK, peak)
            stock(tracker)

    def _stop(self, stock: Any, tracker: Any, stage: str) -> None:
        from hf_mps.metal.device.memory import Peak

        # A stage can be over before its thread has begun: what is held now is its peak then, here and on the CPU.
        peak = tracker.__dict__.pop(_PEAK, None) or Peak("mps")
        if getattr(tracker, "cur_stage", None) == stage and not hasattr(tracker, "cpu_mem_used_peak"):
            tracker.cpu_mem_used_peak = tracker.cpu_mem_used()
        peak.sample()
        stock(tracker, stage)
        figures = (getattr(tracker, "gpu", None) or {}).get(stage, {})
        if isinstance(figures.get("peaked"), str):
            # As on CUDA it is the peak less what is held afterwards; both as the driver counts them.
            highest = peak.result.value
            figures["peaked"] = max(0, highest - peak.sample())
            self.acted(f"the peak of GPU memory in the metrics is {peak.result.reason}", aloud=False)


GUARD = MemoryMetrics()
