"""Quantized weights go to the device, which Trainer leaves to bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_mps.finetune.features.base import Feature, Plan
from hf_mps.finetune.models import quantization

if TYPE_CHECKING:
    from hf_mps.finetune.tasks._base import Prepared


class QuantizedWeights(Feature):
    """The task chooses and loads them (`models.quantization`), since they are rounded while they are read."""

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Put a quantized model on the device."""
        quantization.place(trainer.model, trainer.args.device)
