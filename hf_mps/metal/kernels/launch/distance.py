"""The gradient of distances between all rows of two matrices.

All facts are of operations/Distance.mm, kernels/Distance.h and native/Distance.cpp, which calls the former.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import broadcast
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, i64, padded

SOURCE = "operations/Distance.mm"
LONG_ROW = 64
"""Elements of a row from which a threadgroup has 128 threads, not 32."""
ABSOLUTE, LARGEST, POWER = range(3)
"""The kernels' kinds of norm: of p = 1, of infinity, of any other p."""


@rule("_cdist_backward", source=SOURCE)
def cdist_backward(
    release: Release, gradient: Tensor, first: Tensor, second: Tensor, p: float, distances: Tensor
) -> Tensor:
    """A thread for each element of the first matrix's gradient, rows of the second in tiles."""
    batch = broadcast(tuple(first.shape[:-2]), tuple(second.shape[:-2]))
    if batch is None:
        raise NoRule("PyTorch refuses the arguments")
    first, second = (each.expand((*batch, *each.shape[-2:])).contiguous() for each in (first, second))
    rows, length = first.shape[-2:]
    if 0 in (rows, second.shape[-2], length, math.prod(batch)):
        return torch.zeros_like(first)
    if p in (0, 2):
        raise NoRule("other operators compute it, no kernel of its own")
    kind = ABSOLUTE if p == 1 else LARGEST if math.isinf(p) else POWER
    threads = 128 if length >= LONG_ROW else 32
    kernel = release.kernel(f"cdist_backward_{metal(first.dtype)}_p{kind}_tg{threads}")
    if kind == LARGEST and first.dtype in (torch.float16, torch.bfloat16):
        # A distance that was rounded to half equals no difference any more, by which the kernel knows the largest.
        apart = first.float().unsqueeze(-2) - second.float().unsqueeze(-3)
        distances = torch.linalg.vector_norm(apart, p, dim=-1)
    result = torch.empty_like(first)
    kernel.launch(
        {
            "x1": first,
            "x2": second,
            "grad": gradient.contiguous(),
            "cdist": distances.float().contiguous(),
            "out": result,
            "params": padded(i64(math.prod(batch), rows, second.shape[-2], length) + f32(p - 1), 40),
        },
        (-(-length // threads) * threads, rows, math.prod(batch)),
        (threads, 1, 1),
    )
    return result
