"""Parts of a fused step about a batch.

one-copy: a batch goes to the device as one piece of memory, in place of a copy for each of its tensors.
loss-scalars: what a Trainer does with a batch's loss beside computing it, without launches for single numbers.
padding-masks: the mask of a padded batch is a view of what the batch has, where transformers computes a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_mps.core.patching import OriginalCall, Register
from hf_mps.layer.fused_step import constants
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.switch import Part
from hf_mps.layer.guards.platform import batches
from hf_mps.metal.device import machine

ALIGNED = 256
"""Bytes at whose multiples the tensors begin: the offset of a texture or a constant in a buffer on any GPU of Apple's
(Metal Feature Set Tables), so that of every kernel's argument."""
READS_OFFSETS = 15
"""The macOS from which on PyTorch hands a graph a tensor that begins within a buffer; before, it copies it first
(`needsGather`, ATen/native/mps/OperationUtils.h)."""


class OneCopy(Part):
    """Works within the guard batch-waits, which says when a batch is moved, and keeps the values on the host.

    Each tensor has its dtype, shape and strides, and its own version; what stock does not have is that they share
    a storage, which lives as long as the last of them.
    """

    name = "one-copy"
    what = "each batch in one copy"
    why = "the price of a small copy is the host's"

    def pays(self, device_type: str) -> str:
        """Return the reason where the guard is on and this macOS reads a tensor from the middle of a buffer."""
        macos = machine.present().macos
        reads = macos is None or int(macos.partition(".")[0]) >= READS_OFFSETS
        return self.why if device_type == "mps" and reads and batches.BATCH_WAITS.on else ""

    def install(self, module: ModuleType) -> None:
        """Offer itself to the guard."""
        super().install(module)
        batches.BATCH_WAITS.together = lambda batch: self.safely(self._together, batch) or {}

    def _together(self, batch: Any) -> batches.Moved:
        if "mps" not in self.devices:
            return {}
        moved = together([each for each in batches.tensors(batch) if batches.movable(each)], torch.device("mps"))
        if moved:
            self.acts()
        return moved


def together(sources: list[Tensor], device: torch.device) -> batches.Moved:
    """Copy tensors of the host to the device in one piece, without a wait.

    Returns for each source's id its tensor on the device, and its values on the host in memory of their own. Left out
    are those with gaps or of one element twice, all of them where fewer than two are left, and what would make more
    than `batches.LARGEST` bytes.
    """
    places: list[tuple[Tensor, int]] = []
    size = 0
    for source in sources:
        # A copy keeps the strides of what fills its memory.
        dense = torch.empty_like(source, device="meta").stride() == source.stride()
        if dense and size + source.nbytes <= batches.LARGEST:
            places.append((source, size))
            size += -(-source.nbytes // ALIGNED) * ALIGNED
    if len(places) < 2:
        return {}
    host = torch.empty(size, dtype=torch.uint8)
    here = {id(source): _at(host, source, start) for source, start in places}
    for source, _ in places:
        here[id(source)].copy_(source)
    # The method itself: what is put around Tensor.to looks at single tensors.
    there = torch._C.TensorBase.to(host, device, non_blocking=True)
    return {id(source): (_at(there, source, start), here[id(source)]) for source, start in places}


def _at(buffer: Tensor, like: Tensor, start: int) -> Tensor:
    """Return a tensor as `like` that begins `start` bytes into the buffer."""
    # No view of the buffer: each tensor counts its changes by itself, as those of stock do.
    empty = torch.empty(0, dtype=like.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), start // like.element_size(), like.shape, like.stride())


ONE_COPY = OneCopy()


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
        """Return the same for each model that a Trainer trains."""
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
        """Return a batch's labels on the host; nothing where they are not known there."""
        if not isinstance(batch, Mapping):
            return {}
        found = {name: batches.BATCH_WAITS.host(batch[name]) for name in LABELS if name in batch}
        return found if all(each is not None for each in found.values()) else {}


LOSS_SCALARS = LossScalars()


MASKS = "transformers.masking_utils"


class PaddingMasks(Part):
    """Acts in training, where every query sees the same keys: encoders, with no more than padding to hide.

    transformers compares and indexes positions to make (batch, 1, queries, keys) of (batch, keys): a dozen launches.
    The mask has the same shape and the same bools here, and one row of memory for all queries.
    """

    name = "padding-masks"
    what = "an encoder's mask is a view of the batch's"
    why = "the price of a small launch is the host's, and a mask has a dozen"
    patches = {f"{MASKS}:AttentionMaskInterface.register": Register("_of_sdpa", under="sdpa")}

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a decoder, or a model that computes its attention itself."""
        config = getattr(model, "config", None)
        asked = getattr(config, "_attn_implementation", None)
        texts = hasattr(config, "vocab_size") and not getattr(config, "is_decoder", False)
        causal = "Causal" in type(model).__name__ or "LMHead" in type(model).__name__
        return self.what if asked == "sdpa" and texts and not causal else ""

    @cached_property
    def _of_sdpa(self) -> Callable[..., Any]:
        """Return what makes sdpa's masks, with ours around it."""
        from transformers.masking_utils import sdpa_mask

        return self.wrapped("sdpa_mask", sdpa_mask, self._mask)

    def _mask(self, stock: OriginalCall, *args: Any, **said: Any) -> Any:
        import transformers.masking_utils as masks

        mask: Any = said.get("attention_mask")
        simple = said.get("mask_function") is masks.bidirectional_mask_function and not said.get("use_vmap")
        if args or not simple or not self._ours(mask, said):
            return stock(*args, **said)
        keys = said["kv_length"]
        skips = said.get("allow_is_bidirectional_skip")
        if skips and masks._ignore_bidirectional_mask_sdpa(mask, keys, said.get("local_size")):
            return None
        self.acts()
        return mask[:, None, None, :].expand(-1, 1, said["q_length"], -1)

    def _ours(self, mask: Any, said: Mapping[str, Any]) -> bool:
        plain = said.get("allow_is_causal_skip") is False and not (said.get("kv_offset") or said.get("q_offset"))
        if not plain or not runs(mask) or mask.device.type not in self.devices or not torch.is_grad_enabled():
            return False
        return bool(mask.dtype == torch.bool and mask.shape == (said.get("batch_size"), said.get("kv_length")))


PADDING_MASKS = PaddingMasks()
