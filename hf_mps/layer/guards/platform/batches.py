"""Guards of batches on their way to the device.

batch-waits: batches go to the device, and their masks are looked at, without a wait.
float64-columns: columns of float64 become float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.numerics.layouts import target_device

Moved = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""A tensor's id -> the tensor on the device, and its values on the host, which nobody else has."""
LARGEST = 32 * 2**20
"""Bytes of a tensor from which on it is moved as stock does: its copy on the host would take as long as the wait."""
BOOLEAN = "_preprocess_mask_arguments"
"""Where transformers makes a boolean mask of a batch's."""
LOOKS = ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")
"""Where transformers asks a mask whether it masks anything, to leave it out: a number that the CPU waits for."""


class BatchWaits(Guard):
    """Moves each tensor of a batch from its own copy, which nobody else can write to or free.

    A copy to the device that waits hands over all queued work and waits until it is done (COMMIT_AND_WAIT), for
    each tensor of each batch: the CPU never gets ahead, and the GPU idles while the next step is launched. One that
    does not wait has the GPU read the host's memory when its turn comes. Torch keeps that memory, but not
    what is in it, and gives it back on a thread of Metal's, where memory of NumPy's would need Python's lock; a clone
    has neither trouble, so what arrives is what a waiting copy brings. Memory does not grow with the head start: freed
    blocks are used again at once, in the queue's order, and Metal holds a program back after 64 command buffers.

    The clone of a mask also answers what transformers asks the mask once in a forward pass, by transformers' own code;
    one that masks nothing is not turned into a boolean mask, which nobody would look at.
    """

    name = "batch-waits"
    what = "each tensor of a batch that is moved, and each look at its mask, waits until the GPU has done all its work"
    issue = "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/mps/MPSStream.mm (COMMIT_AND_WAIT)"
    until = "a copy of pageable memory to the device does not wait for the queue, as cudaMemcpyAsync stages it"
    # Torch keeps a source that nobody else has until the GPU has read it.
    always = "this torch waits at each copy to the device, and can hold its source instead"
    patches = {
        **training_hooks.moves("_moving"),
        f"transformers.masking_utils:{BOOLEAN}": "_made_boolean",
        **{f"transformers.masking_utils:{name}": "_looked_at" for name in LOOKS},
    }

    together: Callable[[Any], Moved] | None = None
    """Moves the tensors of a batch at once: one-copy of the fused step, where that is on."""

    def reset(self) -> None:
        """Also forget the batches."""
        super().reset()
        self._hosts = WeakTensorKeyDictionary()  # tensor on the device -> its values on the CPU, and its version then

    def _moving(self, batch: Any) -> AbstractContextManager[Any]:
        values = batch.values() if isinstance(batch, Mapping) else (batch,)
        there = all(type(each) is torch.Tensor and each.device.type == "mps" for each in values)
        if there or not self.needed:
            return nullcontext()
        return _Moves(self, self.together(batch) if self.together is not None else {})

    def moved(self, pairs: list[tuple[Any, Any]]) -> None:
        """Note that tensors of a batch were moved: each with its values on the CPU, which nobody else has."""
        self.acted("batches are moved to the device without a wait for what it has queued", aloud=False)
        for there, host in pairs:
            if 0 < host.dim() <= 2 and not host.is_floating_point():
                self._keep(there, host)

    def _keep(self, there: Any, host: Any) -> None:
        # Of a tensor of inference mode nobody counts the changes.
        if not there.is_inference():
            self._hosts[there] = host, there._version

    def host(self, tensor: Any) -> Any:
        """Return the values of a tensor of a batch on the CPU, while nobody has changed it, or None."""
        if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
            return None
        hosts: Any = self._hosts
        values, version = hosts.get(tensor, (None, 0))
        return values if values is not None and tensor._version == version else None

    def _made_boolean(self, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        given = args[2] if len(args) > 2 else kwargs.get("attention_mask")
        host = self.host(given)
        if host is not None and len(args) > 2 and _needless(host, *args, **kwargs):
            return stock(*args[:2], None, *args[3:], **kwargs)
        result = stock(*args, **kwargs)
        if host is not None and result[1] is not given and result[1].dtype == torch.bool:
            self._keep(result[1], host.bool())
        return result

    def _looked_at(self, stock: OriginalCall, padding_mask: Any, *args: Any, **kwargs: Any) -> Any:
        host = self.host(padding_mask)
        return stock(padding_mask if host is None else host, *args, **kwargs)


class _Moves(TorchFunctionMode):
    """While a batch is moved: its tensors go from clones, and nothing waits. Those in `moved` are there already."""

    def __init__(self, guard: BatchWaits, moved: Moved) -> None:
        super().__init__()
        self.guard, self.moved = guard, moved
        self.pairs: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A plain move of a tensor of numbers to the device, that waits.
        plain = func is torch.Tensor.to and len(args) <= 2 and not kwargs.keys() - {"device", "non_blocking"}
        waits = plain and not kwargs.get("non_blocking") and movable(args[0])
        if not waits or target_device(args[1:], kwargs) != "mps":
            return func(*args, **kwargs)
        # Once: of a tensor that a batch has twice, stock makes two.
        given = self.moved.pop(id(args[0]), None)
        if given is not None:
            self.pairs.append(given)
            return given[0]
        host = args[0].clone()
        # The method itself: what is put around Tensor.to was called already, and led here.
        there = torch._C.TensorBase.to(host, *args[1:], **{**kwargs, "non_blocking": True})
        self.pairs.append((there, host))
        return there

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.pairs:
            self.guard.safely(self.guard.moved, self.pairs)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a batch, through mappings, lists and tuples; each object once."""
    found: dict[int, torch.Tensor] = {}
    waiting = [batch]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return iter(found.values())


def movable(tensor: Any) -> bool:
    """Return whether it is a plain tensor of numbers on the host, and small enough that a copy of it there pays."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and not tensor.requires_grad and 0 < tensor.nbytes <= LARGEST


def _needless(
    mask: Any,
    config: Any,
    embeddings: Any,
    given: Any,
    past: Any = None,
    positions: Any = None,
    layer: Any = None,
    encoded: Any = None,
    **unknown: Any,
) -> bool:
    """Return whether transformers makes of a mask with these values on the host what it makes of none.

    Those are its arguments (masking_utils.py).
    """
    # Without a mask it takes the lengths from the embeddings, and looks in positions for packed sequences.
    source = embeddings if encoded is None else encoded
    known = not unknown and past is None and positions is None
    return known and tuple(mask.shape) == tuple(source.shape[:2]) and bool(mask.all())


BATCH_WAITS = BatchWaits()


class Float64Columns(Guard):
    """Looks at batches just before they are moved; what a script moves itself keeps Metal's error."""

    name = "float64-columns"
    what = "a NumPy or torch column of float64 ends the run with Metal's TypeError when its batch is moved"
    issue = "https://github.com/pytorch/pytorch/issues/77781"
    until = "Metal has float64, which Apple's GPUs do not"
    patches = training_hooks.batches("_change")

    def applies(self) -> Choice[bool]:
        """Return whether the device refuses float64."""
        try:
            torch.zeros(1, dtype=torch.float64, device="mps")
        except TypeError as error:
            return Choice(True, f"tried on the device: {error}")
        return Choice(False, "tried on the device: it takes float64")

    def _change(self, batch: Any) -> Any:
        names: list[str] = []
        changed = _single(batch, "", names)
        if names and self.needed:
            self.acted(f"float64 became float32, which Metal has: {', '.join(sorted(set(names)))}")
            return changed
        return batch


def _single(value: Any, name: str, names: list[str]) -> Any:
    """`value` with its float64 tensors as float32; what holds none is returned itself. Appends their names."""
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.float64:
            return value
        names.append(name or "the batch")
        return value.float()
    if isinstance(value, Mapping):
        inside = {key: _single(each, str(key), names) for key, each in value.items()}
        if all(inside[key] is value[key] for key in inside):
            return value
        # A copy of its kind: a BatchEncoding keeps more than its columns.
        changed: Any = copy.copy(value)
        changed.update(inside)
        return changed
    if isinstance(value, tuple | list):
        items = [_single(each, name, names) for each in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
