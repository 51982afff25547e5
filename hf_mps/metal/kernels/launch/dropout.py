"""Dropout as one kernel forward and one backward. (F.dropout on a Mac does not come here: it multiplies a mask.)"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import walk
from hf_mps.metal.kernels.launch.random import drawn
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, u32

SOURCE = "operations/Dropout.mm"


@rule("native_dropout", source=SOURCE)
def dropout(release: Release, given: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Four elements a thread; the offset of Philox's stream moves by the elements all the same."""
    count = given.numel()
    if count == 0 or not train or p == 0:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    if not 0 <= p <= 1:
        raise NoRule("a probability that PyTorch refuses")
    kernel = release.kernel(f"dropout_fwd_{metal(given.dtype)}")
    if count >= 1 << 32:
        raise NoRule("more than 2**32 elements")
    dense = given.contiguous()
    output = torch.empty_like(dense)
    mask = torch.empty_like(dense, dtype=torch.bool)
    kept = 1 - p
    kernel.launch(
        {
            "output": output,
            "mask": mask,
            "input": dense,
            "params": f32(kept, _inverse(kept)),
            "seed_base_offset": drawn(None, count),
            "numel": u32(count),
        },
        -(-count // 4),
    )
    return output, mask


def _inverse(kept: float) -> float:
    """1 / kept in float32, as the host has it; 0 where nothing is kept."""
    rounded = torch.tensor(kept, dtype=torch.float32)
    return float(1 / rounded) if rounded else 0.0


@rule("native_dropout_backward", source=SOURCE)
def dropout_backward(release: Release, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The gradient of what was kept, scaled; an integer one in float32."""
    if not (grad.is_floating_point() or grad.is_complex()):
        grad = grad.to(torch.float32)
    if mask.dtype != torch.bool or mask.shape != grad.shape:
        raise NoRule("a mask of another dtype or shape")
    kernel = release.kernel(f"dropout_bwd_{metal(grad.dtype)}")
    if not (grad.stride() == mask.stride() and walk(grad).contiguous):
        grad, mask = grad.contiguous(), mask.contiguous()
    output = torch.empty_like(grad)
    if grad.numel():
        kernel.launch({"grad_input": output, "grad_output": grad, "mask": mask, "scale": f32(scale)}, grad.numel())
    return output
