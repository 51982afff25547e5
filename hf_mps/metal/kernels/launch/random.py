"""Random numbers of PyTorch's own stream: each draw reads the generator's seed and offset, and moves the offset on.

Thread by thread, the kernels compute number `offset + thread` of the seed's Philox stream (c10/metal/random.h), and
most make four elements of one. The host moves the offset by the numbers that the kernel takes.
"""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Generator, Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import walk
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, i64, u32

SOURCE = "operations/Distributions.mm"
ERRORS = 15364
"""Bytes of the buffer of errors that a kernel reports to (c10/metal/error.h); the first word counts them."""
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def drawn(generator: Generator | None, count: int) -> bytes:
    """Seed and offset as kernels take them (long2), of `generator` or the device's own, moved on by `count`.

    Raises NoRule for a generator of another device. Call it when nothing can be refused any more.
    """
    source = _default() if generator is None else generator
    if source.device.type != "mps":
        raise NoRule("a generator of another device")
    offset = source.get_offset()
    source.set_offset(offset + count)
    return struct.pack("<2Q", source.initial_seed(), offset)


@cache
def _default() -> Generator:
    found: Generator = torch.mps._get_default_mps_generator()
    return found


def fill(release: Release, output: Tensor, family: str, numbers: bytes, generator: Generator | None) -> Tensor:
    """Fill `output` by the kernel of a distribution, of whose parameters `numbers` are the bytes, and return it."""
    count = output.numel()
    if count == 0:
        return output
    if count >= 1 << 31:
        raise NoRule("more than 2**31 elements")
    kernel = release.kernel(f"{family}_{metal(output.dtype)}")
    packed = any(each.name == "numel" for each in kernel.signature.bindings)
    flat = output if output.is_contiguous() or walk(output).contiguous else _temporary(output)
    threads = -(-count // (2 if output.dtype.itemsize == 8 and family == "random_int" else 4)) if packed else count
    stream = drawn(generator, threads)
    arguments = {"output": flat, "params": numbers, "seed_base_offset": stream}
    kernel.launch(arguments | {"numel": u32(count)} if packed else arguments, threads)
    return output if flat is output else output.copy_(flat)


def _temporary(output: Tensor) -> Tensor:
    if any(stride == 0 and size > 1 for stride, size in zip(output.stride(), output.shape, strict=True)):
        raise NoRule("what is written to holds elements more than once")
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


@rule("uniform_", source=SOURCE)
def uniform(
    release: Release, output: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """Bounds are cut to the dtype's range (uniform_impl_ in DistributionTemplates.h)."""
    real = _real(output)
    limits = torch.finfo(real.dtype)
    if not (low <= high and high - low <= limits.max):
        raise NoRule("bounds that PyTorch refuses")
    low, high = min(max(low, limits.min), limits.max), max(min(high, limits.max), limits.min)
    fill(release, real, "uniform_dist", f32(low, high), generator)
    return output


@rule("normal_", source=SOURCE)
def normal(
    release: Release, output: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """A complex number's parts have half the variance each (normal_impl_ in DistributionTemplates.h)."""
    if std < 0:
        raise NoRule("a standard deviation below zero")
    real = _real(output)
    fill(release, real, "normal", f32(mean, std / math.sqrt(2) if output.is_complex() else std), generator)
    return output


def _real(output: Tensor) -> Tensor:
    """The numbers of a complex tensor in pairs. Raises NoRule where they are no floating-point ones."""
    if output.is_complex():
        return torch.view_as_real(output)
    if not output.is_floating_point():
        raise NoRule("a dtype that PyTorch refuses")
    return output


@rule("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", source="../DistributionTemplates.h")
def normal_of(
    release: Release, mean: Tensor | float, std: Tensor | float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """A mean or a standard deviation for each element, or both: standard numbers, multiplied and added to."""
    given = [each for each in (mean, std) if isinstance(each, Tensor)]
    like = given[0]
    if f"normal_{metal(like.dtype)}" not in release:
        raise NoRule("no kernel for the normal distribution")
    if isinstance(std, Tensor) and (std.is_complex() or (std.numel() and float(std.min()) < 0)):
        raise NoRule("a standard deviation below zero")
    spread = 1.0 if isinstance(std, Tensor) else std
    shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in given))  # type: ignore[no-untyped-call]
    output: Tensor = normal(release, _empty(given[0], shape), 0.0, spread, generator=generator)
    if isinstance(std, Tensor):
        output.mul_(std)
    return output.add_(
        mean if isinstance(mean, Tensor) else torch.full((), mean, dtype=output.dtype, device=output.device)
    )


def _empty(like: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


@rule("bernoulli_.float", source=SOURCE)
def bernoulli(release: Release, output: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """One probability for all."""
    if not 0 <= p <= 1:
        raise NoRule("a probability that PyTorch refuses")
    return fill(release, output, "bernoulli_scalar", f32(p, 0.0), generator)


@rule("bernoulli_.Tensor", source=SOURCE)
def bernoulli_each(release: Release, output: Tensor, p: Tensor, *, generator: Generator | None = None) -> Tensor:
    """A probability for each element, in float32; the offset moves by the elements, the kernel packs four.

    A probability outside of 0 to 1 is written to the buffer of errors: the device's own kernel then words the error.
    """
    count = output.numel()
    if count == 0:
        return output
    if p.dim() == 0:
        return bernoulli(release, output, float(p), generator=generator)
    if p.shape != output.shape:
        raise NoRule("probabilities of another shape")
    kernel = release.kernel(f"bernoulli_tensor_{metal(output.dtype)}")
    probabilities = p.to(torch.float32).contiguous()
    flat = output if output.is_contiguous() else _temporary(output)
    errors = bytearray(ERRORS)
    arguments = {
        "output": flat,
        "probs": probabilities,
        "seed_base_offset": drawn(generator, count),
        "numel": u32(count),
        "error_buf": torch.frombuffer(errors, dtype=torch.uint8),
    }
    kernel.launch(arguments, -(-count // 4))
    if any(errors[:4]):
        raise NoRule("a probability that PyTorch refuses")
    return output if flat is output else output.copy_(flat)


@rule("bernoulli.out", source="../Distributions.cpp")
def bernoulli_out(release: Release, p: Tensor, *, generator: Generator | None = None, out: Tensor) -> Tensor:
    """Probabilities of `p`'s shape and layout; `torch.bernoulli(p)` comes here too."""
    if f"bernoulli_tensor_{metal(out.dtype)}" not in release:
        raise NoRule("no kernel for the Bernoulli distribution")
    if out.shape != p.shape:
        out.resize_(p.shape)
    return bernoulli_each(release, out, p, generator=generator)


@rule("exponential_", source=SOURCE)
def exponential(release: Release, output: Tensor, lambd: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """By the inverse of the distribution function."""
    if not lambd > 0:
        raise NoRule("a rate that PyTorch refuses")
    return fill(release, output, "exponential", f32(lambd, 0.0), generator)


@rule("cauchy_", source=SOURCE)
def cauchy(
    release: Release, output: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Generator | None = None
) -> Tensor:
    """By the inverse of the distribution function."""
    if not sigma > 0:
        raise NoRule("a scale that PyTorch refuses")
    return fill(release, output, "cauchy", f32(median, sigma), generator)


@rule("log_normal_", source=SOURCE)
def log_normal(
    release: Release, output: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Generator | None = None
) -> Tensor:
    """The exponential of normal numbers, which take two uniform ones each."""
    if not std > 0:
        raise NoRule("a standard deviation that PyTorch refuses")
    return fill(release, output, "log_normal", f32(mean, std), generator)


@rule("geometric_", source=SOURCE)
def geometric(release: Release, output: Tensor, p: float, *, generator: Generator | None = None) -> Tensor:
    """The kernel divides by log(1 - p), which the host computes in float64."""
    if not 0 < p < 1:
        raise NoRule("a probability that PyTorch refuses")
    return fill(release, output, "geometric", f32(math.log1p(-p), 0.0), generator)


@rule("random_.from", source=SOURCE)
def random_between(
    release: Release, output: Tensor, low: int, high: int | None, *, generator: Generator | None = None
) -> Tensor:
    """Whole numbers from `low` to `high` - 1; without `high` to the dtype's largest (random_from_to_impl)."""
    if high is None and low == _LOWEST:
        return fill(release, output, "random_int", i64(_LOWEST, 0), generator)
    dtype = output.dtype
    smallest, largest = _limits(dtype)
    last = high - 1 if high is not None else (1 << _DIGITS[dtype] if dtype in _DIGITS else largest)
    if not smallest <= low <= last <= largest:
        raise NoRule("bounds that PyTorch refuses")
    if dtype in _DIGITS:
        # The first whole number from `low` that the dtype has (update_from in DistributionTemplates.h).
        after = int(torch.tensor(low + 1).to(dtype))
        low = low if after >= low else after + (1 << (abs(low + 1).bit_length() - _DIGITS[dtype]))
        last = last if high is None else _rounded_down(high, dtype) - 1
        if low > last:
            raise NoRule("bounds that PyTorch refuses")
    count = last - low + 1
    return fill(release, output, "random_int", i64(low, count if count <= _HIGHEST else 0), generator)


@rule("random_.to", source=SOURCE)
def random_below(release: Release, output: Tensor, high: int, *, generator: Generator | None = None) -> Tensor:
    """From zero to `high` - 1."""
    return random_between(release, output, 0, high, generator=generator)


@rule("random_", source=SOURCE)
def random_any(release: Release, output: Tensor, *, generator: Generator | None = None) -> Tensor:
    """No bounds: below the first whole number that a floating-point dtype has not; else the dtype's, from zero on."""
    dtype = output.dtype
    count = 1 << _DIGITS[dtype] if dtype in _DIGITS else min(_limits(dtype)[1] + 1, _HIGHEST)
    return fill(release, output, "random_int", i64(0, count), generator)


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest and largest number of a dtype. Raises NoRule for one that PyTorch's host refuses."""
    if dtype in _DIGITS:
        return int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    if dtype == torch.bool:
        return 0, 1
    if dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise NoRule("a dtype that PyTorch refuses")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _rounded_down(high: int, dtype: torch.dtype) -> int:
    """The bound below `high` that the dtype has (update_to in DistributionTemplates.h)."""
    before = int(torch.tensor(high - 1).to(dtype))
    return high if before < high else before - (1 << (abs(high - 1).bit_length() - _DIGITS[dtype]))
