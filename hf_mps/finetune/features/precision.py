"""The precision of a run: the recipe's, or the device's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.features.base import SAID, Draft, Feature

KEY = "precision"


class Precision(Feature):
    """float32 on Metal and on a CPU; on CUDA bfloat16 where the GPU computes it."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `precision`."""
        draft.choices[KEY], mixed = precision_of(draft.training, draft.device)
        draft.arguments |= mixed


def precision_of(training: Mapping[str, Any], device_type: str) -> tuple[Choice[str], dict[str, Any]]:
    """Choose fp32, bf16 or fp16, with the arguments for Trainer. Raises UserError for one that the device lacks."""
    from hf_mps.metal.device import precision

    chosen = [name for name in ("bf16", "fp16") if training.get(name)]
    if len(chosen) == 2:
        raise UserError("training.bf16 and training.fp16 are both true; give one of them")
    for name in ("bf16", "fp16"):
        if training.get(name) or training.get(f"{name}_full_eval"):
            try:
                found = precision.requested(name, device_type)
            except UserError as error:
                raise UserError(f"training.{name}: {error}; leave it out") from error
    if chosen:
        return Choice(chosen[0], found.reason), {}
    if "bf16" in training or "fp16" in training:
        return Choice("fp32", SAID), {}
    default = precision.default(device_type)
    return default, {default.value: True} if default.value != "fp32" else {}
