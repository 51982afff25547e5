"""Permutations and draws of categories: kernels of their own for some, other operators for the rest."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.random import drawn, exponential, fill
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, u32

SOURCE = "operations/Distributions.mm"
SMALL, LARGE, KEY_BITS = 384, 1 << 15, 24
"""Up to how many numbers one threadgroup shuffles them; from how many on keys of so many bits are sorted."""
CATEGORIES = 1 << 24


@rule("randperm.generator_out", source=SOURCE)
def permutation(release: Release, n: int, *, generator: Generator | None = None, out: Tensor) -> Tensor:
    """Few numbers are shuffled by one threadgroup, more are the order of random keys, ties shuffled from LARGE on."""
    if n < 0 or n > _most(out.dtype) or (generator is not None and generator.device != out.device):
        raise NoRule("arguments that PyTorch refuses")
    out.resize_(n)
    if n == 0:
        return out
    if n <= SMALL and out.dtype in (torch.int32, torch.int64) and out.is_contiguous():
        kernel = release.kernel(f"randperm_small_{metal(out.dtype)}")
        arguments = {"output": out, "seed_base_offset": drawn(generator, (n + 2) // 4), "n": u32(n)}
        kernel.launch(arguments, groups=1, group=min(256, n))
        return out
    if n >= LARGE:
        return out.copy_(_of_sorted_keys(release, n, generator, out))
    keys = torch.empty(n, dtype=torch.float32, device=out.device)
    order = torch.argsort(fill(release, keys, "uniform_dist", f32(0.0, 1.0), generator))
    return out.copy_(order)


def _of_sorted_keys(release: Release, n: int, generator: Generator | None, out: Tensor) -> Tensor:
    """Keys of 24 bits in order, each run of equal ones shuffled by its first thread.

    The host sorts them by three passes of a radix sort, which keeps equal keys in order as a stable sort does.
    """
    kernel = release.kernel(f"randperm_dedup_islands_{metal(torch.int64)}")
    keys = torch.empty(n, dtype=torch.int32, device=out.device).random_(0, 1 << KEY_BITS, generator=generator)
    ordered, order = torch.sort(keys, stable=True)
    arguments = {"data": order, "keys": ordered, "seed_base_offset": drawn(generator, n), "n": u32(n)}
    kernel.launch(arguments, n)
    return order


def _most(dtype: torch.dtype) -> int:
    """How many numbers from zero on a dtype tells apart (check_supported_max_int_with_precision)."""
    digits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
    return 1 << digits[dtype] if dtype in digits else (2 if dtype == torch.bool else torch.iinfo(dtype).max)


@rule("multinomial", source="../Distributions.cpp")
def multinomial(
    release: Release, weights: Tensor, samples: int, replacement: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Without replacement, or of one sample: the largest of weights over exponential numbers; else by the sums of them.

    What PyTorch refuses is left to the device's kernel: it would say so later, of a Mac's assertion.
    """
    if f"exponential_{metal(weights.dtype)}" not in release:
        raise NoRule("MPSGraph on this release")
    categories = weights.shape[-1] if weights.dim() else 0
    if weights.dim() not in (1, 2) or not 0 < samples <= (samples if replacement else categories):
        raise NoRule("arguments that PyTorch refuses")
    if categories > CATEGORIES or weights.numel() == 0 or not _are_weights(weights):
        raise NoRule("weights that PyTorch refuses")
    if replacement and samples > 1:
        return _by_sums(weights, samples, generator)
    numbers = exponential(release, torch.empty_like(weights), 1.0, generator=generator)
    torch.div(weights, numbers, out=numbers)
    if samples == 1:
        return torch.argmax(numbers, dim=-1, keepdim=True)
    return torch.topk(numbers, samples).indices


def _by_sums(weights: Tensor, samples: int, generator: Generator | None) -> Tensor:
    """Uniform numbers below the whole sum, looked up in the running sums, both in float32."""
    sums = weights.cumsum(-1, dtype=torch.float32)
    shape = [*weights.shape[:-1], samples]
    numbers = torch.rand(shape, generator=generator, dtype=torch.float32, device=weights.device)
    found = torch.searchsorted(sums, numbers.mul_(sums[..., -1:]))
    return found.clamp_(0, weights.shape[-1] - 1)


def _are_weights(weights: Tensor) -> bool:
    """None below zero, infinite or NaN, and in no row all zero."""
    return bool(((weights.max() < float("inf")) & (weights.min() >= 0) & (weights.sum(-1) > 0).all()).item())
