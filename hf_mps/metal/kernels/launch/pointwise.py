"""The three generic pointwise launches: one input, two, three (MetalShaderLibrary in OperationUtils.mm).

Each chooses among the kernels of a name by how the operands lie and by their dtypes: dense (several elements a thread
where there are many), strided, one operand that repeats or is one number, inputs or an output of another dtype, with
a value that the host binds beside them (`alpha`, or a struct of parameters). Releases differ in which of them they
have, and the names tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import Walk, all_dense, plane, walk
from hf_mps.metal.kernels.launch.numbers import SCALAR_TYPES, Alpha, on_device, one_dtype, scalar_type
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64, padded, u32

MANY = 1 << 18
"""Elements from which a thread of a dense kernel does ILP of them, where the output is of a floating dtype."""
ILP = 4
"""Elements that such a thread does (ILP_PER_THREAD in c10/metal/common.h)."""

ELSEWHERE = {"lcm": "on the CPU on this release"} | dict.fromkeys(
    ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"),
    "a kernel that this release compiles from source",
)
"""Where an operator is computed on a release whose library has no kernel of its name: else with MPSGraph."""


def _named(at: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Word the refusal where the release has no kernel at all of the name, which is argument `at` of a launch."""

    def wrap(launch: Callable[..., None]) -> Callable[..., None]:
        @wraps(launch)
        def wrapped(*arguments: Any, **options: Any) -> None:
            try:
                launch(*arguments, **options)
            except NoRule:
                if not _any_of(arguments[0], arguments[at]):
                    reason = ELSEWHERE.get(arguments[at], "MPSGraph on this release")
                    raise NoRule(reason) from None
                raise

        return wrapped

    return wrap


@lru_cache(maxsize=256)
def _any_of(release: Release, name: str) -> bool:
    return any(each.startswith(f"{name}_dense_") for each in release.library)


@_named(3)
def exec_unary(release: Release, output: Tensor, given: Tensor, name: str, beside: Alpha | None = None) -> None:
    """Launch the kernel `name` over one input. Raises NoRule where the release has none for layout and dtypes."""
    count = output.numel()
    if count == 0:
        return
    way = None if all_dense(output, given) else walk(output, given)
    into, of = metal(output.dtype), metal(given.dtype)
    if way is None or way.contiguous:
        _unary_dense(release, output, given, name, into, of, count, beside)
    else:
        _unary_strided(release, output, given, name, into, of, way, beside)


def _unary_dense(
    release: Release,
    output: Tensor,
    given: Tensor,
    name: str,
    into: str,
    of: str,
    count: int,
    beside: Alpha | None,
) -> None:
    many = count >= MANY and output.dtype.is_floating_point
    if beside is not None:
        wide = f"{name}_dense_ilp_{into}_{of}_{beside.type}"
        if many and wide in release:
            release.kernel(wide).launch([output, given, beside.data, u32(count)], -(-count // ILP))
        else:
            release.kernel(f"{name}_dense_{into}_{of}_{beside.type}").launch([output, given, beside.data], count)
        return
    single = f"{name}_dense_scalar_{into}_{of}"
    if single in release:
        if many:
            release.kernel(f"{name}_dense_{into}_{of}").launch([output, given, u32(count)], -(-count // ILP))
        else:
            release.kernel(single).launch([output, given], count)
        return
    casting = f"{name}_dense_castout_{'ilp_' if many else ''}{of}"
    if casting in release:
        into_what = (output.element_size(), SCALAR_TYPES[output.dtype])
        if many:
            data, threads = padded(u32(*into_what, count), 16), -(-count // ILP)
        else:
            data, threads = u32(*into_what), count
        release.kernel(casting).launch([output, given, data], threads)
        return
    release.kernel(f"{name}_dense_{into}_{of}").launch([output, given], count)


def _unary_strided(
    release: Release, output: Tensor, given: Tensor, name: str, into: str, of: str, way: Walk, beside: Alpha | None
) -> None:
    full = f"{name}_strided_{into}_{of}" + (f"_{beside.type}" if beside is not None else "")
    rank = u32(len(way.shape))
    if beside is None and full not in release and f"{name}_strided_castout_{of}" in release:
        full, rank = f"{name}_strided_castout_{of}", u32(len(way.shape), SCALAR_TYPES[output.dtype])
    kernel = release.kernel(full)
    rest = [] if beside is None else [beside.data]
    into_steps, of_steps = way.strides
    inner = way.shape[0]
    operands = [output, given, i64(way.shape), i64(of_steps), i64(into_steps), rank, *rest]
    kernel.launch(operands, *plane(inner, output.numel() // inner))


@_named(4)
def exec_binary(
    release: Release,
    output: Tensor,
    first: Tensor | complex,
    second: Tensor | complex,
    name: str,
    *,
    beside: Alpha | None = None,
    common: torch.dtype | None = None,
    natural: torch.dtype | None = None,
) -> None:
    """Launch the kernel `name` over two inputs that broadcast to the output.

    One of them may be a number on the CPU. `common` is the dtype that both are promoted to (the output's, or for a
    comparison the inputs'), `natural` what the kernel gives where the output may be of another dtype. Raises NoRule
    where the release has no kernel for layout and dtypes.
    """
    if output.numel() == 0:
        return
    casts_out = natural is not None and natural != output.dtype
    first, second = on_device(first), on_device(second)
    if first.dtype == second.dtype and not casts_out and all_dense(output, first, second):
        _binary_dense(release, output, first, second, name, beside)
        return
    if casts_out:
        assert natural is not None
        full = f"{name}_strided_castout_{metal(natural)}_{metal(common or natural)}"
        _binary_strided(release, output, first, second, full + _tail(beside), beside)
        return
    kind = _repeating(output, first, second)
    if kind.startswith("dense_scalar"):
        first, second = one_dtype(kind, common or output.dtype, first, second)
    way = None if kind else walk(output, first, second)
    kind = kind or ("dense" if way is not None and way.contiguous else "strided")
    if first.dtype != second.dtype:
        # Such a kernel computes in the output's dtype; where that is bool, in the inputs' common one.
        computes = (common or output.dtype) if output.dtype == torch.bool else output.dtype
        full = f"{name}_{kind}_cast_{metal(output.dtype)}_{metal(computes)}{_tail(beside)}"
    elif kind == "dense":
        _binary_dense(release, output, first, second, name, beside)
        return
    else:
        of = metal((second if kind.endswith(("_lhs", "_rhs")) else first).dtype)
        full = f"{name}_{kind}_{metal(output.dtype)}_{of}{_tail(beside)}"
    if kind == "strided":
        _binary_strided(release, output, first, second, full, beside)
        return
    rest: list[bytes] = []
    if kind.startswith("dense_broadcast"):
        rest.append(i64((first if kind.endswith("_rhs") else second).numel()))
    if beside is not None:
        rest.append(beside.data)
    if first.dtype != second.dtype:
        rest.append(u32(first.element_size(), second.element_size(), scalar_type(first), scalar_type(second)))
    release.kernel(full).launch([output, first, second, *rest], output.numel())


def _tail(beside: Alpha | None) -> str:
    return "" if beside is None else f"_{beside.type}"


def _binary_strided(
    release: Release, output: Tensor, first: Tensor, second: Tensor, full: str, beside: Alpha | None
) -> None:
    way = walk(output, first, second)
    kinds = u32(len(way.shape), scalar_type(first), scalar_type(second), scalar_type(output))
    rest = [] if beside is None else [beside.data]
    rest += [i64(way.shape), *(i64(each) for each in way.strides), kinds]
    release.kernel(full).launch([output, first, second, *rest], output.numel())


def _binary_dense(
    release: Release, output: Tensor, first: Tensor, second: Tensor, name: str, beside: Alpha | None
) -> None:
    count = output.numel()
    dtypes = f"{metal(output.dtype)}_{metal(first.dtype)}{_tail(beside)}"
    if beside is not None:
        release.kernel(f"{name}_dense_{dtypes}").launch([output, first, second, beside.data], count)
        return
    if count >= MANY and output.dtype.is_floating_point:
        wide = f"{name}_dense_ilp{ILP}_{dtypes}"
        if wide in release:
            release.kernel(wide).launch([output, first, second, u32(count)], -(-count // ILP))
            return
    release.kernel(f"{name}_dense_{dtypes}").launch([output, first, second], count)


def _repeating(output: Tensor, first: Tensor, second: Tensor) -> str:
    """The layout of kernels for an operand that repeats along the leading dimensions; or "" where none does."""
    if not output.is_contiguous():
        return ""
    count = output.numel()
    full = first.numel() == count, second.numel() == count
    if full[1] and not full[0] and second.is_contiguous() and repeats(first, output):
        return "dense_scalar_lhs" if first.numel() == 1 else "dense_broadcast_rhs"
    if full[0] and not full[1] and first.is_contiguous() and repeats(second, output):
        return "dense_scalar" if second.numel() == 1 else "dense_broadcast"
    return ""


def repeats(tensor: Tensor, output: Tensor) -> bool:
    """The output's trailing dimensions, then ones: contiguous (is_dense_broadcastable in OperationUtils.h)."""
    if not tensor.is_contiguous():
        return False
    differs = False
    for mine, whole in zip(reversed(tensor.shape), reversed(output.shape), strict=False):
        if differs and mine != 1:
            return False
        differs = differs or mine != whole
    # The dimension that differs first must be one element too, else the operands would not broadcast.
    return True


@_named(5)
def exec_ternary(release: Release, output: Tensor, first: Tensor, second: Tensor, third: Tensor, name: str) -> None:
    """Launch the kernel `name` over three inputs. Raises NoRule where the release has none for layout and dtypes."""
    count = output.numel()
    if count == 0:
        return
    inputs = [on_device(each) for each in (first, second, third)]
    casts = any(each.dtype != inputs[0].dtype for each in inputs[1:])
    dense = all_dense(output, *inputs)
    way = None if dense else walk(output, *inputs)
    into, of = metal(output.dtype), metal(inputs[0].dtype)
    layout = "dense" if way is None or way.contiguous else "strided"
    kernel = release.kernel(f"{name}_{layout}_cast_{into}" if casts else f"{name}_{layout}_{into}_{of}")
    rest: list[Any] = []
    types = [scalar_type(each) for each in inputs]
    if way is not None and not way.contiguous:
        rest = [i64(way.shape), *(i64(each) for each in way.strides), u32(len(way.shape))]
        if casts:
            rest.append(u32(*types, scalar_type(output)))
    elif casts:
        sizes = [each.element_size() for each in inputs]
        rest = [padded(u32(sizes), 16), padded(u32(types), 16)]
    kernel.launch([output, *inputs, *rest], count)
