"""Products with weights of four and eight bits, and the packing of the former.

All facts are of operations/Quantized.mm. Weights are [outputs, inputs]; scales are one an output, or scales and zero
points of groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import padded, u32

SOURCE = "operations/Quantized.mm"
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128, 256)
"""Inputs that share a scale and a zero point."""
FEW_ROWS = 12
"""Rows of the input from which the host takes the kernel for products of matrices, below it one for vectors."""


@rule("_convert_weight_to_int4pack", source=SOURCE)
def convert_weight_to_int4pack(release: Release, weight: Tensor, inner_tiles: int) -> Tensor:
    """Two weights a byte, [outputs, inputs / 2], in the kernels' order; the shape is that of other devices."""
    fits = weight.dim() == 2 and weight.dtype == torch.uint8 and inner_tiles in (2, 4, 8)
    if not fits or weight.shape[0] % 8 or weight.shape[1] * 2 % (16 * inner_tiles):
        raise NoRule("PyTorch refuses the arguments")
    weight = weight.contiguous()
    outputs, halves = weight.shape
    shape = (outputs // 8, halves * 2 // (16 * inner_tiles), 32, inner_tiles // 2)
    packed = torch.empty(shape, dtype=torch.int32, device=weight.device)
    release.kernel("weight_to_int4pack").launch(
        {"W": weight, "outputData": packed, "sizes": u32(outputs, halves // 4)}, (outputs, halves // 4, 1), (64, 1, 1)
    )
    return packed


@rule("_weight_int4pack_mm", source=SOURCE)
def weight_int4pack_mm(release: Release, given: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor:
    """The product with packed weights; each is (weight - 8) * scale + zero point of its group."""
    _check(given, weight, torch.int32)
    if weight.dim() != 4 or group not in GROUPS or scales.shape[1:] != (weight.shape[0] * 8, 2):
        raise NoRule("PyTorch refuses the arguments")
    rows, inputs, outputs = given.shape[0], given.shape[1], weight.shape[0] * 8
    result = given.new_empty((rows, outputs))
    release.kernel(f"int4pack_mm_{group}_{metal(given.dtype)}").launch(
        {
            "A": given,
            "B": weight,
            "scales_and_zeros": scales,
            "output_data": result,
            "sizes": padded(u32(rows, inputs, outputs), 16),
        },
        (outputs // 4 * 32, 1, rows),
        (64, 1, 1),
    )
    return result


@rule("_weight_int8pack_mm", source=SOURCE)
def weight_int8pack_mm(release: Release, given: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product with weights of eight bits, row by row; of FEW_ROWS rows and more it is left out.

    Those take `large_m_int8pack_mm`, which reads what other simdgroups wrote without two barriers (after the loop over
    the inputs, before the scales overwrite the tile of weights, and before one simdgroup writes all results): what it
    computes depends on their pace. With both put in, it agrees.
    """
    _check(given, weight, torch.int8)
    rows, inputs = given.shape
    outputs = weight.shape[0]
    if weight.shape[1:] != (inputs,) or scales.shape != (outputs,) or outputs % 32 or inputs % 32:
        raise NoRule("PyTorch refuses the arguments")
    if rows >= FEW_ROWS:
        raise NoRule("the kernel's simdgroups race: it lacks two barriers")
    result = given.new_empty((rows, outputs))
    release.kernel(f"int8pack_mv_{metal(given.dtype)}").launch(
        {
            "A": given,
            "B": weight,
            "scalesAndZeros": scales,
            "outputData": result,
            "sizes": padded(u32(rows, inputs, outputs), 16),
        },
        groups=(-(-outputs // 8), rows, 1),
        group=(64, 1, 1),
        threadgroup={0: 32},
    )
    return result


def _check(given: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    fits = given.dim() == 2 and given.dtype in FLOATING and weight.dtype == dtype
    if not fits or not given.is_contiguous() or not weight.is_contiguous():
        raise NoRule("PyTorch refuses the arguments")
