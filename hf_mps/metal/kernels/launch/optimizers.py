"""Lists of tensors in few launches: fused Adam, AdamW and SGD, and gradients unscaled for GradScaler."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.pointwise import walk
from hf_mps.metal.kernels.rules import kernels, refuse, rule
from hf_mps.metal.kernels.values import NoRule, Pointers, f32, i32, metal, u8
from hf_mps.metal.operators.launch_class import CHUNK, GROUPS, TENSORS, Batch, batches

_TABLE = struct.Struct(f"<{TENSORS + 2 * GROUPS}Q")


def _metadata(batch: Batch, tensors: Sequence[Tensor]) -> bytes:
    """The kernel's MetadataArguments: elements of each tensor, and of each threadgroup its tensor and its chunk."""
    columns = [[tensors[number].numel() for number in batch.tensors], *zip(*batch.chunks, strict=True)]
    filled = ((*each, *[0] * (room - len(each))) for each, room in zip(columns, (TENSORS, GROUPS, GROUPS), strict=True))
    return _TABLE.pack(*(number for each in filled for number in each))


def _addresses(batch: Batch, lists: Sequence[Sequence[Tensor]]) -> Pointers:
    """The kernel's argument buffer: 32 addresses for each list."""
    rest = [None] * (TENSORS - len(batch.tensors))
    found = [tensor for each in lists for tensor in (*(each[number] for number in batch.tensors), *rest)]
    return Pointers(found, 8 * len(found))


GROUP = 32
"""Threads of a threadgroup, which share out the elements of a chunk.

A Mac's host takes 512. The results are the same; here one thread follows another, and the caches of a CPU like it when
a thread's next element is near: an element takes 18 ns so, and 46 ns with 512 threads.
"""


# Host: operations/FusedAdamKernel.mm, operations/FusedAdamWKernel.mm.
@rule("_fused_adam_", "_fused_adam_.tensor_lr", family="fused_adam")
@rule("_fused_adamw_", "_fused_adamw_.tensor_lr", family="fused_adamw")
def adam(*lists: list[Tensor], family: str, amsgrad: bool, **values: float | Tensor | None) -> None:
    """Adam, with weight decay in the gradient, and AdamW, which decays weights apart from it."""
    parameters, grads, averages, squares, largest, steps = lists
    if not parameters:
        return
    updated = [parameters, grads, averages, squares, *([largest] if amsgrad else [])]
    _require_alike(updated)
    if len(steps) != len(parameters) or any(not step.is_mps or step.dtype != steps[0].dtype for step in steps):
        raise NoRule("steps of another device, or of several dtypes")
    name = f"{family}{'_amsgrad' if amsgrad else ''}_{metal(parameters[0].dtype)}_{metal(steps[0].dtype)}"
    _launch(name, updated, [*updated, steps], values)


OF_MOMENTUM = ("dampening", "nesterov", "is_first_step")
LEARNING_RATE = "a learning rate of another dtype or size"


# Host: operations/FusedSgdKernel.mm.
@rule("_fused_sgd_", "_fused_sgd_.tensor_lr")
def sgd(*given: list[Tensor], momentum: float, **values: float | Tensor | None) -> None:
    """SGD, with another kernel for momentum."""
    parameters, grads, momenta = given
    if not parameters:
        return
    refuse(bool(momenta) != (momentum > 0), "momentum without its buffers, or buffers without momentum")
    lists = [parameters, grads, *([momenta] if momenta else [])]
    _require_alike(lists)
    if momenta:
        values["momentum"] = momentum
    else:
        values = {name: value for name, value in values.items() if name not in OF_MOMENTUM}
    name = f"fused_sgd{'_momentum' if momenta else ''}_{metal(parameters[0].dtype)}"
    _launch(name, lists, lists, values)


def _require_alike(lists: Sequence[list[Tensor]]) -> None:
    """What PyTorch asks of lists (check_fast_path_restrictions in ForeachUtils.h). Raises NoRule else."""
    dtype = lists[0][0].dtype
    refuse(any(len(each) != len(lists[0]) for each in lists), "lists of several lengths")
    for alike in zip(*lists, strict=True):
        first = alike[0]
        for each in alike:
            if each.dtype != dtype or not each.is_mps or each.shape != first.shape or each.stride() != first.stride():
                raise NoRule("tensors of several devices, dtypes, shapes or layouts")
        refuse(not (first.is_contiguous() or walk(first).contiguous), "tensors with gaps")


def _launch(
    name: str, tensors: list[list[Tensor]], bound: list[list[Tensor]], values: Mapping[str, float | Tensor | None]
) -> None:
    """Launch the kernel over all chunks; truths are bytes, and a learning rate of the device is bound in place."""
    kernel = kernels[name]
    numbers: dict[str, Any] = {"grad_scale": None, "found_inf": None}
    for word, value in values.items():
        if isinstance(value, Tensor) and word == "lr":
            refuse(value.is_mps and (value.dtype != torch.float32 or value.numel() != 1), LEARNING_RATE)
            value = value if value.is_mps else float(value)
        numbers[word] = u8(value) if isinstance(value, bool) else f32(value) if isinstance(value, float) else value
    for batch in batches(each.numel() for each in tensors[0]):
        pointers = {"args": _addresses(batch, bound), "metadata_args": _metadata(batch, tensors[0])}
        groups = len(batch.chunks)
        kernel.launch({**pointers, **numbers}, groups=groups, group=GROUP, work=CHUNK * groups)


# Host: operations/Amp.mm.
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


@rule("_amp_foreach_non_finite_check_and_unscale_")
def unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A launch for each dense gradient, 32 chunks at once; one by one those with gaps."""
    if not grads:
        return
    single = (each.is_mps and each.numel() == 1 and each.dtype == torch.float32 for each in (found_inf, inv_scale))
    refuse(not all(single), "a factor or a mark of another device, size or dtype")
    if any(not each.is_mps or each.dtype != grads[0].dtype or each.dtype not in _FLOATING for each in grads):
        raise NoRule("gradients of several devices or dtypes")
    dense = [each for each in grads if each.is_contiguous() or walk(each).contiguous]
    dtype = metal(grads[0].dtype)
    many = kernels[f"ampNonFiniteCheckAndUnscale_{dtype}"]
    # By identity: `in` would compare the tensors' elements.
    done = {id(each) for each in dense}
    gapped = [each for each in grads if id(each) not in done]
    # The kernel for one gradient walks memory from its first element, and takes as many as the gradient has. Of one
    # with gaps these are not its elements: the fault is the host's, and stays.
    if any(each.untyped_storage().nbytes() // each.itemsize < each.storage_offset() + each.numel() for each in gapped):
        raise NoRule("a gradient that holds elements more than once")
    for grad in gapped:
        kernels[f"ampNonFiniteCheckAndUnscaleSingle_{dtype}"].launch([grad, found_inf, inv_scale], grad.numel(), 256)
    for batch in batches((each.numel() for each in dense), alone=True):
        arguments = [_addresses(batch, [dense]), _metadata(batch, dense), found_inf, inv_scale]
        groups = len(batch.chunks)
        many.launch(arguments, groups=groups, group=64, work=CHUNK * groups)


@rule("_amp_update_scale_")
def update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """One thread: smaller after an overflow, larger after `interval` steps without one."""
    kernel = kernels[f"ampUpdateScale_{metal(scale.dtype)}"]
    if not (growth_tracker.dtype == torch.int32 and found_inf.dtype == torch.float32 and found_inf.is_mps):
        raise NoRule("a tracker or a mark of another dtype or device")
    kernel.launch([scale, growth_tracker, found_inf, f32(growth), f32(backoff), i32(interval)], 1)
    return scale
