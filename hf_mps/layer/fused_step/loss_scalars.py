"""What a Trainer does with a batch's loss beside computing it, without launches for single numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.fused_step import constants
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.base import Part
from hf_mps.layer.guards.platform import batch_waits

LABELS = ("labels", "shift_labels")
"""What Trainer counts the items of a batch by (trainer.py, `_get_num_items_in_batch`)."""


class LossScalars(Part):
    """Acts where one process trains: Accelerate's division by one, the one that a backward pass begins with, the count.

    Trainer counts a batch's labels on the device, in four launches. Their values are known on the host, where the guard
    batch-waits moved the batch: its own code counts them there, and the number is one that the device has already, or
    one launch. Every number is stock's to the bit.
    """

    name = "loss-scalars"
    what = "a batch's labels are counted on the host, and its loss is not divided by one"
    why = "the price of a small launch is the host's, and single numbers have seven"
    patches = {
        "accelerate.accelerator:Accelerator.backward": "_backward",
        "transformers.trainer:Trainer._get_num_items_in_batch": "_items",
    }

    def words(self, model: Any, device_type: str) -> str:
        """The same for each model that a Trainer trains."""
        return "labels counted on the host"

    def _backward(self, stock: OriginalCall, accelerator: Any, loss: Any, **kwargs: Any) -> Any:
        scaled = accelerator.scaler is not None or accelerator.gradient_accumulation_steps != 1
        kind = getattr(accelerator.distributed_type, "value", "")
        # DeepSpeed, Megatron and LOMO have backward passes of their own.
        plain = kind in ("NO", "MULTI_CPU", "MULTI_GPU") and not kwargs and not scaled
        if not (plain and self._ours(loss)):
            return stock(accelerator, loss, **kwargs)
        self.acts()
        return stock.foreign(loss.backward, constants.number(1.0, loss.dtype, loss.device))

    def _ours(self, loss: Any) -> bool:
        return runs(loss) and loss.dim() == 0 and loss.requires_grad and loss.device.type in self.devices

    def _items(self, stock: OriginalCall, trainer: Any, batches: Any, device: Any) -> Any:
        single = trainer.args.world_size == 1 and trainer.args.n_gpu <= 1
        here = [self._labels(batch) for batch in batches] if single and device.type in self.devices else []
        if not here or not all(here):
            return stock(trainer, batches, device)
        found = stock.partial(trainer, here, torch.device("cpu"))
        if not isinstance(found, torch.Tensor):
            return found
        self.acts()
        return constants.number(found.item(), found.dtype, device)

    def _labels(self, batch: Any) -> dict[str, Any]:
        """A batch's labels on the host; nothing where they are not known there."""
        if not isinstance(batch, Mapping):
            return {}
        found = {name: batch_waits.GUARD.host(batch[name]) for name in LABELS if name in batch}
        return found if all(each is not None for each in found.values()) else {}


PART = LossScalars()
