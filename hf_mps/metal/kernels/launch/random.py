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

from hf_mps.metal.kernels.launch.pointwise import walk
from hf_mps.metal.kernels.rules import errors, kernels, refuse, refuse_repeated, rule
from hf_mps.metal.kernels.values import NoRule, f32, i64, metal, u32

# Host: operations/Distributions.mm.
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def drawn(generator: Generator | None, count: int) -> bytes:
    """Seed and offset as kernels take them (long2), of `generator` or the device's own, moved on by `count`.

    Raises NoRule for a generator of another device. Call it when nothing can be refused any more.
    """
    source = _default() if generator is None else generator
    refuse(source.device.type != "mps", "a generator of another device")
    offset = source.get_offset()
    source.set_offset(offset + count)
    return struct.pack("<2Q", source.initial_seed(), offset)


@cache
def _default() -> Generator:
    found: Generator = torch.mps._get_default_mps_generator()
    return found


def fill(output: Tensor, family: str, numbers: bytes, generator: Generator | None) -> Tensor:
    """Fill `output` by the kernel of a distribution, of whose parameters `numbers` are the bytes, and return it."""
    count = output.numel()
    refuse(count >= 1 << 31, "more than 2**31 elements")
    kernel = kernels[f"{family}_{metal(output.dtype)}"]
    flat = output if output.is_contiguous() or walk(output).contiguous else _temporary(output)
    # A Philox number has four words of 32 bits, and a thread makes an element of each, or of each two.
    threads = -(-count // (2 if output.dtype.itemsize == 8 and family == "random_int" else 4))
    stream = drawn(generator, threads)
    kernel.launch({"output": flat, "params": numbers, "seed_base_offset": stream, "numel": u32(count)}, threads)
    return output if flat is output else output.copy_(flat)


def _temporary(output: Tensor) -> Tensor:
    refuse_repeated(output)
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


@rule("uniform_")
def uniform(output: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """Bounds are cut to the dtype's range (uniform_impl_ in DistributionTemplates.h)."""
    real = _real(output)
    limits = torch.finfo(real.dtype)
    refuse(not (low <= high and high - low <= limits.max), "bounds that PyTorch refuses")
    low, high = min(max(low, limits.min), limits.max), max(min(high, limits.max), limits.min)
    fill(real, "uniform_dist", f32(low, high), generator)
    return output


@rule("normal_")
def normal(output: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """A complex number's parts have half the variance each (normal_impl_ in DistributionTemplates.h)."""
    refuse(std < 0, "a standard deviation below zero")
    real = _real(output)
    fill(real, "normal", f32(mean, std / math.sqrt(2) if output.is_complex() else std), generator)
    return output


def _real(output: Tensor) -> Tensor:
    """Return the numbers of a complex tensor in pairs. Raises NoRule where they are no floating-point ones."""
    if output.is_complex():
        return torch.view_as_real(output)
    refuse(not output.is_floating_point(), "a dtype that PyTorch refuses")
    return output


# Host: ../DistributionTemplates.h.
@rule("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def normal_of(mean: Tensor | float, std: Tensor | float = 1.0, *, generator: Generator | None = None) -> Tensor:
    """A mean or a standard deviation for each element, or both: standard numbers, multiplied and added to."""
    given = [each for each in (mean, std) if isinstance(each, Tensor)]
    like = given[0]
    refuse(f"normal_{metal(like.dtype)}" not in kernels, "no kernel for the normal distribution")
    if isinstance(std, Tensor) and (std.is_complex() or (std.numel() and float(std.min()) < 0)):
        raise NoRule("a standard deviation below zero")
    spread = 1.0 if isinstance(std, Tensor) else std
    shape: torch.Size = torch.broadcast_shapes(*(each.shape for each in given))  # type: ignore[no-untyped-call]
    output: Tensor = normal(like.new_empty(shape), 0.0, spread, generator=generator)
    if isinstance(std, Tensor):
        output.mul_(std)
    return output.add_(mean if isinstance(mean, Tensor) else output.new_full((), mean))


@rule("bernoulli_.Tensor")
def bernoulli_each(output: Tensor, p: Tensor, *, generator: Generator | None = None) -> Tensor:
    """A probability for each element, in float32; the offset moves by the elements, the kernel packs four.

    A probability outside of 0 to 1 is written to the buffer of errors: the device's own kernel then words the error.
    """
    count = output.numel()
    if p.dim() == 0:
        return distributed(output, float(p), generator=generator, family="bernoulli_scalar")
    refuse(p.shape != output.shape, "probabilities of another shape")
    kernel = kernels[f"bernoulli_tensor_{metal(output.dtype)}"]
    probabilities = p.to(torch.float32).contiguous()
    flat = output if output.is_contiguous() else _temporary(output)
    arguments = {"output": flat, "probs": probabilities, "numel": u32(count), "error_buf": errors.tensor}
    kernel.launch({**arguments, "seed_base_offset": drawn(generator, count)}, -(-count // 4))
    refuse(errors.any(), "a probability that PyTorch refuses")
    return output if flat is output else output.copy_(flat)


# Host: ../Distributions.cpp.
@rule("bernoulli.out")
def bernoulli_out(p: Tensor, *, generator: Generator | None = None, out: Tensor) -> Tensor:
    """Probabilities of `p`'s shape and layout; `torch.bernoulli(p)` comes here too."""
    refuse(f"bernoulli_tensor_{metal(out.dtype)}" not in kernels, "no kernel for the Bernoulli distribution")
    if out.shape != p.shape:
        out.resize_(p.shape)
    return bernoulli_each(out, p, generator=generator)


PARAMETERS = {"bernoulli_scalar": (0.5, 0.0), "exponential": (1.0, 0.0), "log_normal": (1.0, 2.0)}
"""The numbers that a distribution's kernel takes: what PyTorch takes where none are given."""


@rule("bernoulli_.float", family="bernoulli_scalar")
@rule("exponential_", family="exponential")
@rule("log_normal_", family="log_normal")
def distributed(output: Tensor, *given: float, generator: Generator | None = None, family: str) -> Tensor:
    """Fill a tensor with numbers of a distribution."""
    first, second = (*given, *PARAMETERS[family][len(given) :])
    allowed = {"bernoulli_scalar": 0 <= first <= 1, "exponential": first > 0, "log_normal": second > 0}
    refuse(not allowed[family], "parameters that PyTorch refuses")
    return fill(output, family, f32(first, second), generator)


@rule("random_.from", "random_.to")
def random_between(output: Tensor, *bounds: int | None, generator: Generator | None = None) -> Tensor:
    """Whole numbers from a bound, or 0, to another less 1, or to the dtype's largest (random_from_to_impl)."""
    low, high = (0, *bounds)[-2:]
    assert low is not None
    if high is None and low == _LOWEST:
        return fill(output, "random_int", i64(_LOWEST, 0), generator)
    dtype = output.dtype
    smallest, largest = _limits(dtype)
    last = high - 1 if high is not None else (1 << _DIGITS[dtype] if dtype in _DIGITS else largest)
    refuse(not smallest <= low <= last <= largest, "bounds that PyTorch refuses")
    if dtype in _DIGITS:
        # The first whole number from `low` that the dtype has (update_from in DistributionTemplates.h).
        after = int(torch.tensor(low + 1).to(dtype))
        low = low if after >= low else after + (1 << (abs(low + 1).bit_length() - _DIGITS[dtype]))
        if high is not None:
            # The bound below `high` that the dtype has (update_to).
            before = int(torch.tensor(high - 1).to(dtype))
            last = (high if before < high else before - (1 << (abs(high - 1).bit_length() - _DIGITS[dtype]))) - 1
        refuse(low > last, "bounds that PyTorch refuses")
    count = last - low + 1
    # A range that int64 cannot count is bound as 0, with which the kernel takes all 64 bits, as above.
    return fill(output, "random_int", i64(low, count if count <= _HIGHEST else 0), generator)


@rule("random_")
def random_any(output: Tensor, *, generator: Generator | None = None) -> Tensor:
    """No bounds: below the first whole number that a floating-point dtype has not; else the dtype's, from zero on."""
    dtype = output.dtype
    count = 1 << _DIGITS[dtype] if dtype in _DIGITS else min(_limits(dtype)[1] + 1, _HIGHEST)
    return fill(output, "random_int", i64(0, count), generator)


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and largest number of a dtype. Raises NoRule for one that PyTorch's host refuses."""
    if dtype in _DIGITS:
        return int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    if dtype == torch.bool:
        return 0, 1
    if dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise NoRule("a dtype that PyTorch refuses")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


# Host: operations/Dropout.mm.


@rule("native_dropout")
def dropout(given: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Four elements a thread; the offset of Philox's stream moves by the elements all the same."""
    count = given.numel()
    # No word of training is none here (value_or(false) in Dropout.mm), and is training in the CPU's kernel.
    if count == 0 or not train or p == 0:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    refuse(not 0 <= p <= 1, "a probability that PyTorch refuses")
    kernel = kernels[f"dropout_fwd_{metal(given.dtype)}"]
    refuse(count >= 1 << 32, "more than 2**32 elements")
    dense = given.contiguous()
    output = torch.empty_like(dense)
    mask = torch.empty_like(dense, dtype=torch.bool)
    kept = 1 - p
    # 1 / kept in float32, as the host has it; 0 where nothing is kept.
    inverse = float(1 / torch.tensor(kept, dtype=torch.float32)) if kept else 0.0
    numbers = {"params": f32(kept, inverse), "seed_base_offset": drawn(None, count), "numel": u32(count)}
    kernel.launch({"output": output, "mask": mask, "input": dense, **numbers}, -(-count // 4))
    return output, mask


@rule("native_dropout_backward")
def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The gradient of what was kept, scaled; an integer one in float32."""
    if not (grad.is_floating_point() or grad.is_complex()):
        grad = grad.to(torch.float32)
    refuse(mask.dtype != torch.bool or mask.shape != grad.shape, "a mask of another dtype or shape")
    kernel = kernels[f"dropout_bwd_{metal(grad.dtype)}"]
    if not (grad.stride() == mask.stride() and walk(grad).contiguous):
        grad, mask = grad.contiguous(), mask.contiguous()
    output = torch.empty_like(grad)
    kernel.launch({"grad_input": output, "grad_output": grad, "mask": mask, "scale": f32(scale)}, grad.numel())
    return output


# Numbers of the stream that each sample may take for itself, as it draws until one is accepted (GAMMA_RANDOMS_STRIDE).
STRIDE = 32


@rule("_standard_gamma")
def gamma(given: Tensor, generator: Generator | None = None) -> Tensor:
    """A thread for each number, of shape `given` and scale one."""
    output = given.new_empty(given.shape)
    kernel = kernels[f"standard_gamma_{metal(output.dtype)}"]
    refuse(output.numel() >= 1 << 31, "more than 2**31 elements")
    kernel.launch([output, given.contiguous(), drawn(generator, STRIDE * output.numel())], output.numel())
    return output


@rule("_sample_dirichlet")
def dirichlet(alpha: Tensor, generator: Generator | None = None) -> Tensor:
    """A threadgroup for each row of the last dimension, which sums to one."""
    output, dense = alpha.new_empty(alpha.shape), alpha.contiguous()
    kernel = kernels[f"standard_dirichlet_{metal(output.dtype)}"]
    count = output.numel()
    if count:
        row = alpha.shape[-1] if alpha.dim() else 1
        arguments = [output, dense, drawn(generator, STRIDE * count), u32(row)]
        kernel.launch(arguments, groups=count // row, group=min(row, 1024))
    return output


@rule("_standard_gamma_grad", family="standard_gamma_grad")
@rule("_dirichlet_grad", family="dirichlet_grad")
def gradient(*given: Tensor, family: str) -> Tensor:
    """How a gamma number, or a row's number, moves with its shape."""
    output = given[0].new_empty(given[0].shape)
    kernel = kernels[f"{family}_{metal(output.dtype)}"]
    if any(each.shape != output.shape or each.dtype != output.dtype for each in given):
        raise NoRule("operands of several shapes or dtypes")
    kernel.launch([output, *(each.contiguous() for each in given)], output.numel())
    return output


# One thread does all of a small shuffle's swaps: above SMALL they take longer than sorting keys does. Three passes of
# a radix sort take KEY_BITS, which leave so few equal keys that one thread for each run of them is enough.
SMALL, LARGE, KEY_BITS = 384, 1 << 15, 24
"""Up to how many numbers one threadgroup shuffles them; from how many on keys of so many bits are sorted."""
# Whole numbers up to here are apart in float32 (FLOAT32_MAX_CONSECUTIVE_INT of ../Distributions.cpp).
CATEGORIES = 1 << 24


@rule("randperm.generator_out")
def permutation(n: int, *, generator: Generator | None = None, out: Tensor) -> Tensor:
    """Few numbers are shuffled by one threadgroup, more are the order of random keys, ties shuffled from LARGE on."""
    if n < 0 or n > _most(out.dtype) or (generator is not None and generator.device != out.device):
        raise NoRule("arguments that PyTorch refuses")
    out.resize_(n)
    if n == 0:
        return out
    if n <= SMALL and out.dtype in (torch.int32, torch.int64) and out.is_contiguous():
        kernel = kernels[f"randperm_small_{metal(out.dtype)}"]
        # A shuffle draws n - 1 numbers, of which one of Philox has four.
        arguments = {"output": out, "seed_base_offset": drawn(generator, (n + 2) // 4), "n": u32(n)}
        kernel.launch(arguments, groups=1, group=min(256, n))
        return out
    if n >= LARGE:
        # Keys of 24 bits in order, each run of equal ones shuffled by its first thread. The host sorts them by three
        # passes of a radix sort, which keeps equal keys in order as a stable sort does.
        kernel = kernels[f"randperm_dedup_islands_{metal(torch.int64)}"]
        keys = torch.empty(n, dtype=torch.int32, device=out.device).random_(0, 1 << KEY_BITS, generator=generator)
        ordered, order = torch.sort(keys, stable=True)
        arguments = {"data": order, "keys": ordered, "seed_base_offset": drawn(generator, n), "n": u32(n)}
        kernel.launch(arguments, n)
        return out.copy_(order)
    keys = torch.empty(n, dtype=torch.float32, device=out.device)
    return out.copy_(torch.argsort(fill(keys, "uniform_dist", f32(0.0, 1.0), generator)))


def _most(dtype: torch.dtype) -> int:
    """Return how many numbers from zero on a dtype tells apart (check_supported_max_int_with_precision)."""
    return 1 << _DIGITS[dtype] if dtype in _DIGITS else (2 if dtype == torch.bool else torch.iinfo(dtype).max)


# Host: ../Distributions.cpp.
@rule("multinomial")
def multinomial(
    weights: Tensor, samples: int, replacement: bool = False, *, generator: Generator | None = None
) -> Tensor:
    """Without replacement, or of one sample: the largest of weights over exponential numbers; else by the sums of them.

    What PyTorch refuses is left to the device's kernel: it would say so later, of a Mac's assertion.
    """
    kernels.need(f"exponential_{metal(weights.dtype)}")
    categories = weights.shape[-1] if weights.dim() else 0
    if weights.dim() not in (1, 2) or not 0 < samples <= (samples if replacement else categories):
        raise NoRule("arguments that PyTorch refuses")
    refuse(categories > CATEGORIES or weights.numel() == 0 or not _are_weights(weights), "weights that PyTorch refuses")
    if replacement and samples > 1:
        # Uniform numbers below the whole sum, looked up in the running sums, both in float32.
        sums, shape = weights.cumsum(-1, dtype=torch.float32), [*weights.shape[:-1], samples]
        drawn_numbers = torch.rand(shape, generator=generator, dtype=torch.float32, device=weights.device)
        return torch.searchsorted(sums, drawn_numbers.mul_(sums[..., -1:])).clamp_(0, categories - 1)
    # Of weights over exponential numbers each is the largest with its share of the weights as the probability.
    numbers = fill(torch.empty_like(weights), "exponential", f32(1.0, 0.0), generator)
    torch.div(weights, numbers, out=numbers)
    return torch.argmax(numbers, dim=-1, keepdim=True) if samples == 1 else torch.topk(numbers, samples).indices


def _are_weights(weights: Tensor) -> bool:
    """None below zero, infinite or NaN, and in no row all zero."""
    return bool(((weights.max() < float("inf")) & (weights.min() >= 0) & (weights.sum(-1) > 0).all()).item())
