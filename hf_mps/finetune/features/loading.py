"""Who reads a run's rows ahead of the training, and into which memory."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.features.base import Draft, Feature
from hf_mps.finetune.stream import pace


class Loading(Feature):
    """The training process itself, but for streamed rows; pinned memory on CUDA."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `pin_memory`, `workers` and, of streamed rows, `readers`."""
        choices, stream = draft.choices, draft.prepared.stream
        pinned = draft.device == "cuda"
        reason = "CUDA copies faster from pinned memory" if pinned else f"{draft.device} cannot use pinned memory"
        choices["pin_memory"] = draft.setting("dataloader_pin_memory", pinned, reason)
        reason = (
            "the training process prepares its rows itself; training.dataloader_num_workers=2 has others do it ahead"
        )
        if draft.prepared.token_counts is not None:
            reason = "tokenised rows are read from memory-mapped files, faster than from another process"
        workers = Choice(0, reason) if stream is None else pace.workers()
        choices["workers"] = draft.setting("dataloader_num_workers", workers.value, workers.reason)
        if stream is not None:
            choices["readers"] = pace.readers(stream, choices["workers"].value)
        settled: dict[str, Any] = {"dataloader_pin_memory": pinned, "dataloader_num_workers": workers.value}
        # A copy that waits for the device ends what the processor has prepared ahead, batch by batch.
        draft.arguments |= settled | ({"accelerator_config": {"non_blocking": True}} if pinned else {})
