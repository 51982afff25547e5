"""What GradScaler launches: gradients unscaled and looked through, and the scale's next value."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import walk
from hf_mps.metal.kernels.launch.multi_tensor import GROUPS, Batch, batches
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import Kernel, NoRule
from hf_mps.metal.kernels.values import f32, i32

SOURCE = "operations/Amp.mm"
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


@rule("_amp_foreach_non_finite_check_and_unscale_", source=SOURCE)
def unscale(release: Release, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A launch for each dense gradient, 32 chunks at once; one by one those with gaps."""
    if not grads:
        return
    for each in (found_inf, inv_scale):
        if not (each.is_mps and each.numel() == 1 and each.dtype == torch.float32):
            raise NoRule("a factor or a mark of another device, size or dtype")
    if any(not each.is_mps or each.dtype != grads[0].dtype or each.dtype not in _FLOATING for each in grads):
        raise NoRule("gradients of several devices or dtypes")
    dense = [each for each in grads if each.is_contiguous() or walk(each).contiguous]
    dtype = metal(grads[0].dtype)
    many = release.kernel(f"ampNonFiniteCheckAndUnscale_{dtype}")
    one = release.kernel(f"ampNonFiniteCheckAndUnscaleSingle_{dtype}") if len(dense) < len(grads) else many
    if one is not many:
        done = {id(each) for each in dense}
        _one_by_one(one, [each for each in grads if id(each) not in done], found_inf, inv_scale)
    for batch in batches(dense, _full):
        arguments = [batch.addresses([dense]), batch.metadata(), found_inf, inv_scale]
        many.launch(arguments, groups=len(batch.chunks), group=64, work=batch.elements)


def _full(batch: Batch, tensor_done: bool) -> bool:
    """A launch is never of two tensors (multi_tensor_apply in MultiTensorApply.h)."""
    return tensor_done or len(batch.chunks) == GROUPS


def _one_by_one(kernel: Kernel, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """The kernel for one gradient walks memory from its first element, and takes as many as the gradient has.

    Of one with gaps these are not its elements: the fault is the host's, and stays.
    """
    if any(each.untyped_storage().nbytes() // each.itemsize < each.storage_offset() + each.numel() for each in grads):
        raise NoRule("a gradient that holds elements more than once")
    for grad in grads:
        if grad.numel():
            kernel.launch([grad, found_inf, inv_scale], grad.numel(), 256)


@rule("_amp_update_scale_", source=SOURCE)
def update_scale(
    release: Release,
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """One thread: smaller after an overflow, larger after `growth_interval` steps without one."""
    kernel = release.kernel(f"ampUpdateScale_{metal(scale.dtype)}")
    if not (growth_tracker.dtype == torch.int32 and found_inf.dtype == torch.float32 and found_inf.is_mps):
        raise NoRule("a tracker or a mark of another dtype or device")
    numbers = [f32(growth_factor), f32(backoff_factor), i32(growth_interval)]
    kernel.launch([scale, growth_tracker, found_inf, *numbers], 1)
    return scale
