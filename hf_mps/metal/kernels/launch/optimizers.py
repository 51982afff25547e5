"""Fused Adam, AdamW and SGD: a step over all parameters in few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import walk
from hf_mps.metal.kernels.launch.multi_tensor import GROUPS, TENSORS, Batch, batches
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, u8

GROUP = 32
"""Threads of a threadgroup, which share out the elements of a chunk.

A Mac's host takes 512. The results are the same; here one thread follows another, and the caches of a CPU like it when
a thread's next element is near: an element takes 18 ns so, and 46 ns with 512 threads.
"""


@rule("_fused_adam_", "_fused_adam_.tensor_lr", source="operations/FusedAdamKernel.mm", family="fused_adam")
@rule("_fused_adamw_", "_fused_adamw_.tensor_lr", source="operations/FusedAdamWKernel.mm", family="fused_adamw")
def adam(
    release: Release,
    *lists: list[Tensor],
    family: str,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adam, with weight decay in the gradient, and AdamW, with weight decay of its own."""
    parameters, grads, averages, squares, largest, steps = lists
    if not parameters:
        return
    updated = [parameters, grads, averages, squares, *([largest] if amsgrad else [])]
    _require_alike(updated)
    if len(steps) != len(parameters) or any(not step.is_mps or step.dtype != steps[0].dtype for step in steps):
        raise NoRule("steps of another device, or of several dtypes")
    name = f"{family}{'_amsgrad' if amsgrad else ''}_{metal(parameters[0].dtype)}_{metal(steps[0].dtype)}"
    values: dict[str, bytes | Tensor | None] = {
        "lr": _rate(lr),
        "beta1": f32(beta1),
        "beta2": f32(beta2),
        "weight_decay": f32(weight_decay),
        "eps": f32(eps),
        "maximize": u8(maximize),
    }
    _launch(release, name, updated, [*updated, steps], values, grad_scale, found_inf)


@rule("_fused_sgd_", "_fused_sgd_.tensor_lr", source="operations/FusedSgdKernel.mm")
def sgd(
    release: Release,
    parameters: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float | Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """SGD, with a kernel of its own for momentum."""
    if not parameters:
        return
    if bool(momenta) != (momentum > 0):
        raise NoRule("momentum without its buffers, or buffers without momentum")
    lists = [parameters, grads, *([momenta] if momenta else [])]
    _require_alike(lists)
    values: dict[str, bytes | Tensor | None] = {
        "weight_decay": f32(weight_decay),
        "lr": _rate(lr),
        "maximize": u8(maximize),
    }
    if momenta:
        values |= {
            "momentum": f32(momentum),
            "dampening": f32(dampening),
            "nesterov": u8(nesterov),
            "is_first_step": u8(is_first_step),
        }
    name = f"fused_sgd{'_momentum' if momenta else ''}_{metal(parameters[0].dtype)}"
    _launch(release, name, lists, lists, values, grad_scale, found_inf)


def _rate(lr: float | Tensor) -> bytes | Tensor:
    """A learning rate of the device is bound as it lies there, one of the CPU by value."""
    if not isinstance(lr, Tensor):
        return f32(lr)
    if not lr.is_mps:
        return f32(float(lr))
    if lr.dtype != torch.float32 or lr.numel() != 1:
        raise NoRule("a learning rate of another dtype or size")
    return lr


def _require_alike(lists: Sequence[list[Tensor]]) -> None:
    """What PyTorch asks of lists (check_fast_path_restrictions in ForeachUtils.h). Raises NoRule else."""
    dtype = lists[0][0].dtype
    if any(len(each) != len(lists[0]) for each in lists):
        raise NoRule("lists of several lengths")
    for alike in zip(*lists, strict=True):
        first = alike[0]
        for each in alike:
            if each.dtype != dtype or not each.is_mps or each.shape != first.shape or each.stride() != first.stride():
                raise NoRule("tensors of several devices, dtypes, shapes or layouts")
        if not (first.is_contiguous() or walk(first).contiguous):
            raise NoRule("tensors with gaps")


def _launch(
    release: Release,
    name: str,
    tensors: Sequence[list[Tensor]],
    bound: Sequence[list[Tensor]],
    values: dict[str, bytes | Tensor | None],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Launch the kernel over all chunks."""
    kernel = release.kernel(name)
    values = {**values, "grad_scale": grad_scale, "found_inf": found_inf}
    for batch in batches(tensors[0], _full):
        pointers = {"args": batch.addresses(bound), "metadata_args": batch.metadata()}
        kernel.launch({**pointers, **values}, groups=len(batch.chunks), group=GROUP, work=batch.elements)


def _full(batch: Batch, tensor_done: bool) -> bool:
    """Multi_tensor_apply_for_fused_optimizer in MultiTensorApply.h."""
    return len(batch.chunks) == GROUPS or (tensor_done and len(batch.tensors) == TENSORS)
