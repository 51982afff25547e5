"""A step of 8-bit Adam for a weight in one dispatch, where PyTorch's operators would need thirty and copies in float32.

It takes the place of the kernel that bitsandbytes does not have for mps, with that one's arguments
(`bitsandbytes::optimizer_update_8bit_blockwise`, bitsandbytes/backends/cpu/ops.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.training_kernels import trial
from hf_mps.metal.training_kernels.library import TYPES, Source
from hf_mps.metal.training_kernels.trial import Case

SOURCE = Source("adam_8bit.metal")
BLOCK = 256
"""Elements that share a scale: what bitsandbytes calls blocksize."""
PART = 2**22
"""Elements that operators take at a time, whose copies in float32 are 16 MiB each."""
OPERATOR = "optimizer_update_8bit_blockwise"


def update(name: str, gradient: Tensor, weight: Tensor, first: Tensor, second: Tensor | None, *how: Any) -> None:
    """Take a step as bitsandbytes' operator does: one that is not Adam's by the Python that it has for the CPU."""
    if name != "adam" or second is None:
        by_operators(OPERATOR, name, gradient, weight, first, second, *how)
        return
    beta1, beta2, _, _, epsilon, step, rate, map1, map2, most1, most2, decay, scale, *_ = how
    correction = math.sqrt(1 - beta2**step)
    numbers = [beta1, beta2, epsilon, rate / (1 - beta1**step), correction, 1 - rate * decay, scale]
    tensors = [weight, gradient, first, second, most1, most2, map1, map2]
    kernel = weight.dtype in TYPES and weight.numel() < 2**31 and trial.may_act("adam-8bit")
    (adam if kernel else written_out)(tensors, numbers)


def by_operators(operator: str, *given: Any) -> None:
    """Run the Python that bitsandbytes has for an operator on the CPU with tensors of any device."""
    # Past the dispatcher, which would take the kernel of the tensors' own device.
    getattr(torch.ops.bitsandbytes, operator).default._op_dk(torch._C.DispatchKey.CPU, *given)


def adam(tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
    """Take a step in place.

    `tensors`: weight and gradient; both moments, as bytes; the largest value of each one's blocks, as float32; and
    what a byte means for each, 256 float32 in rising order. All are contiguous. `numbers`: both betas, epsilon, the
    rate over the first moment's correction, the root of the second's, and what weight and gradient are multiplied by.
    """
    count = tensors[0].numel()
    SOURCE.kernel("adam", tensors[0].dtype)(
        *tensors, count, list(numbers), threads=-(-count // BLOCK) * BLOCK, group_size=BLOCK, arg_casts={8: "int32"}
    )


def written_out(tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
    """Take the same step by PyTorch's operators, a part of the weight at a time."""
    beta1, beta2, epsilon, rate, correction, decay, scale = numbers
    whole, maps = [each.view(-1) for each in tensors[:6]], tensors[6:]
    for start in range(0, len(whole[0]), PART):
        weight, gradient, first, second = (each[start : start + PART] for each in whole[:4])
        blocks = slice(start // BLOCK, -(-(start + len(weight)) // BLOCK))
        dtype = torch.promote_types(weight.dtype, torch.float32)
        given, moments = gradient.to(dtype) * scale, []
        for codes, most, meaning, moved in zip(
            (first, second), whole[4:], maps, ((beta1, given), (beta2, given * given)), strict=True
        ):
            value = meaning.to(dtype)[codes.int()] * most[blocks].to(dtype).repeat_interleave(BLOCK)[: len(codes)]
            moments.append(value.mul_(moved[0]).add_(moved[1], alpha=1 - moved[0]))
        weight.copy_(weight.to(dtype) * decay - moments[0] / (moments[1].sqrt() / correction + epsilon) * rate)
        for codes, most, meaning, value in zip((first, second), whole[4:], maps, moments, strict=True):
            rows = torch.nn.functional.pad(value, (0, -len(value) % BLOCK)).view(-1, BLOCK)
            largest = rows.abs().amax(1)
            # A block of zeros has no largest value to be divided by.
            scaled = (rows / largest.clamp(min=1e-38)[:, None]).view(-1)[: len(value)]
            codes.copy_(torch.bucketize(scaled, ((meaning[:-1] + meaning[1:]) / 2).to(dtype), out_int32=True))
            most[blocks] = largest.to(most.dtype)


def cases(_: str) -> Iterator[Case]:
    """Yield two steps of a weight, the first from nothing."""
    draw = torch.Generator().manual_seed(0)
    for shape, dtype in (((100, 333), torch.float32), ((64, 96), torch.bfloat16)):
        inputs = [torch.randn(*shape, generator=draw) for _ in range(2)]
        sides = (functools.partial(_two_steps, each) for each in (adam, written_out))
        yield trial.case(f"{shape[0]} x {shape[1]}", inputs, dtype, *sides)


def _two_steps(way: Any, weight: Tensor, gradient: Tensor) -> Sequence[Tensor]:
    """Return the weight and both moments, as numbers of one size."""
    weight, device = weight.clone(), weight.device
    signed = torch.linspace(-1, 1, 256).pow(3)
    maps = [signed.to(device), torch.linspace(0, 1, 256).pow(3).to(device)]
    codes = [torch.full(weight.shape, place, dtype=torch.uint8, device=device) for place in (128, 0)]
    most = [torch.zeros(-(-weight.numel() // BLOCK), device=device) for _ in range(2)]
    for step in (1, 2):
        numbers = [0.9, 0.999, 1e-8, 1e-2 / (1 - 0.9**step), math.sqrt(1 - 0.999**step), 1 - 1e-4, 1.0]
        way([weight, gradient * step, *codes, *most, *maps], numbers)
    moments = [
        meaning[code.int()].view(-1) * largest.repeat_interleave(BLOCK)[: weight.numel()]
        for meaning, code, largest in zip(maps, codes, most, strict=True)
    ]
    return weight, *(each / each.abs().max() for each in moments)
