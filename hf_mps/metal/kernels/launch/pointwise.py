"""How a pointwise operator walks over its operands, and its three generic launches: one input, two, three.

Shapes broadcast; dimensions are put in the order of their strides, fastest first, and merged where every operand runs
through them in one stride. What is left is one dimension without gaps (a dense kernel), or sizes with a stride in bytes
for each operand (a strided one). Facts: aten/src/ATen/TensorIterator.cpp.

A launch (MetalShaderLibrary in OperationUtils.mm) chooses among the kernels of a name by the operands' layouts and
dtypes: dense (several elements a thread where there are many), strided, one operand that repeats or is one number,
inputs or an output of another dtype, with a value that the host binds beside them (`alpha`, or a struct of parameters).
Releases differ in which of them they have, and the names tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import GRAPH, kernels, refuse
from hf_mps.metal.kernels.values import NoRule, i64, metal, padded, scalar, u8, u32
from hf_mps.metal.operators.calls import ON_METAL

LARGEST_GROUP = 1024

LARGEST_OFFSET = (1 << 31) - 1
"""Bytes from a tensor's start beyond which the host cuts a launch into several."""

Lying = tuple[tuple[int, ...], tuple[int, ...], int]
"""A tensor's shape, strides in elements, and bytes of an element."""


class Walk(NamedTuple):
    """The way through the operands of one launch."""

    shape: tuple[int, ...]
    """Elements along each dimension that is left, the fastest first."""
    strides: tuple[tuple[int, ...], ...]
    """Bytes from one element to the next along each of them, for each operand."""
    contiguous: bool
    """Every operand is without gaps in the same order."""


def walk(output: Tensor, *inputs: Tensor) -> Walk:
    """Return the way through an output and its inputs, which broadcast to it.

    Raises:
        NoRule: an operand spans 2 GiB or more, which the host cuts into several launches.
    """
    return _walk(tuple((tuple(each.shape), each.stride(), each.element_size()) for each in (output, *inputs)))


MAY_SPAN = 1 << 27
"""Elements that may span 2 GiB, so that `walk` has to look."""


def plane(across: int, down: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return a grid of two dimensions, and its threadgroup of as many threads as it may have (mtl_dispatch2DJob)."""
    width = max(1, min(across, LARGEST_GROUP))
    return (across, down, 1), (width, max(1, min(down, LARGEST_GROUP // width)), 1)


def all_dense(output: Tensor, *inputs: Tensor) -> bool:
    """Every operand is contiguous and has the output's shape: the quick test for the common case."""
    shape = output.shape
    if not output.is_contiguous() or output.numel() >= MAY_SPAN:
        return False
    return all(each.shape == shape and each.is_contiguous() for each in inputs)


@lru_cache(maxsize=4096)
def _walk(operands: tuple[Lying, ...]) -> Walk:
    shape = operands[0][0]
    rank = len(shape)
    order, strides = _ordered(shape, operands)
    sizes = [shape[dim] for dim in order]
    steps = [[each[dim] for dim in order] for each in strides]
    for size_steps in steps:
        reach = sum((size - 1) * step for size, step in zip(sizes, size_steps, strict=True))
        refuse(reach >= LARGEST_OFFSET, "an operand of 2 GiB or more, which the host launches in parts")
    if all(each[0] == shape for each in operands) and all(is_dense(*each[:2]) for each in operands):
        return Walk((math.prod(shape),), tuple((each[2],) for each in operands), contiguous=True)
    # In place: `sizes` and `steps` have the merged dimensions first, and what is behind them means nothing.
    kept = _merge(sizes, steps) if rank > 1 else rank
    walk = Walk(tuple(sizes[:kept]), tuple(tuple(each[:kept]) for each in steps), contiguous=False)
    dense = kept == 0 or (kept == 1 and all(each[0] == op[2] for each, op in zip(steps, operands, strict=True)))
    return walk._replace(contiguous=dense or all(size == 1 for size in shape))


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements are side by side in order, the strides of dimensions of length 1 left aside."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _ordered(shape: tuple[int, ...], operands: Sequence[Lying]) -> tuple[list[int], list[list[int]]]:
    """Return the dimensions, fastest first, and each operand's strides in bytes over the broadcast shape."""
    rank = len(shape)
    strides = [_broadcast_strides(shape, *each) for each in operands]
    order = list(range(rank - 1, -1, -1))
    for at in range(1, rank):
        mine = at
        for other in range(at - 1, -1, -1):
            before = _compare(shape, strides, order[other], order[mine])
            if before > 0:
                order[other], order[mine] = order[mine], order[other]
                mine = other
            elif before < 0:
                break
    return order, strides


def _broadcast_strides(shape: tuple[int, ...], mine: tuple[int, ...], strides: tuple[int, ...], size: int) -> list[int]:
    missing = len(shape) - len(mine)
    own = zip(shape[missing:], mine, strides, strict=True)
    return [0] * missing + [0 if each == 1 and whole != 1 else stride * size for whole, each, stride in own]


def _compare(shape: tuple[int, ...], strides: list[list[int]], first: int, second: int) -> int:
    """1 where `first` should come after `second`, -1 where before, 0 where no operand tells."""
    for each in strides:
        one, two = each[first], each[second]
        # An operand that repeats along one of them says nothing of their order (should_swap in reorder_dimensions).
        if one == 0 or two == 0:
            continue
        if one != two:
            return 1 if one > two else -1
        # Of equal strides the shorter dimension is the faster one.
        if shape[first] > shape[second]:
            return 1
    return 0


def _merge(sizes: list[int], steps: list[list[int]]) -> int:
    """Merge neighbouring dimensions in place; the number that is left."""
    last = 0
    for dim in range(1, len(sizes)):
        size = sizes[dim]
        if 1 not in (sizes[last], size) and any(sizes[last] * each[last] != each[dim] for each in steps):
            last += 1
            sizes[last] = 1  # as one that is still to take the next dimension's strides
        if sizes[last] == 1:
            for each in steps:
                each[last] = each[dim]
        sizes[last] *= size
    return last + 1


def result(dtype: torch.dtype, *inputs: Tensor) -> Tensor:
    """Return a new output for inputs, with the shape and strides that TensorIterator gives it, on the device.

    Raises:
        NoRule: the shapes do not broadcast, or no input is on the device.
    """
    first = inputs[0] if inputs[0].is_mps else next((each for each in inputs if each.is_mps), inputs[0])
    shape, strides = first.shape, first.stride()
    if all(each.shape == shape and each.stride() == strides for each in inputs):
        return torch.empty_like(first, dtype=dtype)
    lying = _result(tuple((tuple(each.shape), each.stride()) for each in inputs))
    return torch.empty_strided(*lying, dtype=dtype, device=first.device)


@lru_cache(maxsize=4096)
def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that all of them broadcast to. Raises NoRule where there is none."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise NoRule("PyTorch refuses the arguments: their shapes do not broadcast") from None


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape and strides."""


@lru_cache(maxsize=4096)
def _result(inputs: tuple[Layout, ...]) -> Layout:
    shape = broadcast(*(each for each, _ in inputs))
    order = list(range(len(shape) - 1, -1, -1))
    if not (all(each == shape for each, _ in inputs) and all(is_dense(*each) for each in inputs)):
        order, _ = _ordered(shape, [(*each, 1) for each in inputs])
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        # As PyTorch lays out tensors without elements, whose strides are not 0.
        step *= max(1, shape[dim])
    return shape, tuple(strides)


SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.complex32: 8, torch.complex64: 9, torch.bool: 11, torch.bfloat16: 15, torch.uint16: 27, torch.uint32: 28,
    torch.uint64: 29,
}  # fmt: skip
"""c10::ScalarType, by which kernels that cast know a dtype (c10/metal/common.h)."""

INTEGERS = frozenset(dtype for dtype in SCALAR_TYPES if not (dtype.is_floating_point or dtype.is_complex))

MANY = 1 << 18
"""Elements from which a thread of a dense kernel does ILP of them, where the output is of a floating dtype."""
ILP = 4
"""Elements that such a thread does (ILP_PER_THREAD in c10/metal/common.h)."""


class Alpha(NamedTuple):
    """A value beside the operands: the bytes that are bound, and the name of its type in the kernel's name."""

    data: bytes
    type: str


@lru_cache(maxsize=1024)
def _number(sign: bool, kind: str, number: complex, dtype: torch.dtype) -> Alpha:
    return Alpha(scalar(number, dtype), metal(dtype))


@lru_cache(maxsize=1024)
def _held(sign: bool, kind: str, number: complex) -> Tensor:
    # Python's floats are doubles, which Metal does not have.
    dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32, "complex": torch.complex64}[kind]
    return torch.tensor(number, dtype=dtype)


def valued(number: complex, dtype: torch.dtype) -> Alpha:
    """Return a number of a dtype, as `alpha` or another value beside the operands."""
    # Zeros of both signs are equal, and a cache would give one for the other.
    return _number(str(number).startswith("-"), type(number).__name__, number, dtype)


def params(name: str, dtype: torch.dtype, *numbers: float, truth: bool | None = None) -> Alpha:
    """Return a struct of numbers of a dtype, as `ELUParams<float>`, with a bool at its end where there is one."""
    data = b"".join(scalar(number, dtype) for number in numbers)
    if truth is not None:
        # In C a struct's size is a multiple of its widest member's.
        data = padded(data + u8(truth), len(data) + dtype.itemsize)
    return Alpha(data, f"{name}_{metal(dtype)}")


def one_dtype(kind: str, common: torch.dtype, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A whole number beside a tensor of float or complex64 becomes one of that dtype, and no cast is needed."""
    one, tensor = (first, second) if kind == "dense_scalar_lhs" else (second, first)
    if tensor.dtype != common or one.dtype not in INTEGERS or common not in (torch.float32, torch.complex64):
        return first, second
    one = one.to(common)
    return (one, second) if kind == "dense_scalar_lhs" else (first, one)


def on_device(tensor: Tensor | complex) -> Tensor:
    """Return a number, Python's or a tensor on the CPU, as it is bound: of float where it is of double."""
    if not isinstance(tensor, Tensor):
        return _held(str(tensor).startswith("-"), type(tensor).__name__, tensor)
    if tensor.is_mps:
        return tensor
    refuse(tensor.dim(), "PyTorch refuses the arguments: a tensor on the CPU")
    return tensor.to(ON_METAL.get(tensor.dtype, tensor.dtype))


def scalar_type(tensor: Tensor) -> int:
    metal(tensor.dtype)
    return SCALAR_TYPES[tensor.dtype]


@lru_cache(maxsize=256)
def _need_any(release: object, name: str) -> None:
    """Raise NoRule where the release has no kernel at all of a name."""
    refuse(not any(each.startswith(f"{name}_dense_") for each in kernels.release.library), GRAPH)  # type: ignore[union-attr]


def unary(output: Tensor, given: Tensor, name: str, beside: Alpha | None = None, *, many: bool | None = None) -> None:
    """Launch the kernel `name` over one input. Raises NoRule where the release has none for layout and dtypes.

    `many` says whether a thread takes several elements, where that is not decided as for most operators.
    """
    count = output.numel()
    # Before the dtypes are looked at: what has no kernel at all counts as MPSGraph's, whatever the call.
    _need_any(kernels.release, name)
    way = None if all_dense(output, given) else walk(output, given)
    into, of, tail = metal(output.dtype), metal(given.dtype), _tail(beside)
    rest = [] if beside is None else [beside.data]
    kind = SCALAR_TYPES[output.dtype]
    if way is not None and not way.contiguous:
        full, rank = f"{name}_strided_{into}_{of}{tail}", u32(len(way.shape))
        if beside is None and full not in kernels and f"{name}_strided_castout_{of}" in kernels:
            full, rank = f"{name}_strided_castout_{of}", u32(len(way.shape), kind)
        inner, (into_steps, of_steps) = way.shape[0], way.strides
        operands = [output, given, i64(way.shape), i64(of_steps), i64(into_steps), rank, *rest]
        kernels[full].launch(operands, *plane(inner, count // inner))
        return
    many = count >= MANY and output.dtype.is_floating_point if many is None else many
    full, threads = f"{name}_dense_{into}_{of}{tail}", count
    several = -(-count // ILP)
    # Three ways of naming what a thread of several elements runs: with a value beside them, a kernel of its own for
    # one element a thread (so that the plain name means several), or a kernel that casts.
    if beside is not None:
        wide = f"{name}_dense_ilp_{into}_{of}{tail}"
        if many and wide in kernels:
            full, rest, threads = wide, [*rest, u32(count)], several
    elif f"{name}_dense_scalar_{into}_{of}" in kernels:
        if many:
            rest, threads = [u32(count)], several
        else:
            full = f"{name}_dense_scalar_{into}_{of}"
    elif f"{name}_dense_castout_{'ilp_' if many else ''}{of}" in kernels:
        full = f"{name}_dense_castout_{'ilp_' if many else ''}{of}"
        rest = [padded(u32(output.element_size(), kind, count), 16) if many else u32(output.element_size(), kind)]
        threads = several if many else count
    kernels[full].launch([output, given, *rest], threads)


def binary(
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
    count = output.numel()
    _need_any(kernels.release, name)
    first, second, tail = on_device(first), on_device(second), _tail(beside)
    rest = [] if beside is None else [beside.data]
    kind = ""
    if natural is not None and natural != output.dtype:
        kind, full = "strided", f"{name}_strided_castout_{metal(natural)}_{metal(common or natural)}{tail}"
    elif first.dtype == second.dtype and all_dense(output, first, second):
        kind, full = "dense", f"{name}_dense_{metal(output.dtype)}_{metal(first.dtype)}{tail}"
    else:
        kind = _repeating(output, first, second)
        if kind.startswith("dense_scalar"):
            first, second = one_dtype(kind, common or output.dtype, first, second)
        kind = kind or ("dense" if walk(output, first, second).contiguous else "strided")
        if first.dtype != second.dtype:
            # Such a kernel computes in the output's dtype; where that is bool, in the inputs' common one.
            computes = (common or output.dtype) if output.dtype == torch.bool else output.dtype
            full = f"{name}_{kind}_cast_{metal(output.dtype)}_{metal(computes)}{tail}"
        else:
            of = metal((second if kind.endswith(("_lhs", "_rhs")) else first).dtype)
            full = f"{name}_{kind}_{metal(output.dtype)}_{of}{tail}"
    if kind == "strided":
        way = walk(output, first, second)
        kinds = u32(len(way.shape), scalar_type(first), scalar_type(second), scalar_type(output))
        rest += [i64(way.shape), *(i64(each) for each in way.strides), kinds]
    elif kind == "dense" and first.dtype == second.dtype:
        wide = full.replace("_dense_", f"_dense_ilp{ILP}_")
        if beside is None and count >= MANY and output.dtype.is_floating_point and wide in kernels:
            kernels[wide].launch([output, first, second, u32(count)], -(-count // ILP))
            return
    else:
        if kind.startswith("dense_broadcast"):
            rest.insert(0, i64((first if kind.endswith("_rhs") else second).numel()))
        if first.dtype != second.dtype:
            rest.append(u32(first.element_size(), second.element_size(), scalar_type(first), scalar_type(second)))
    kernels[full].launch([output, first, second, *rest], count)


def _tail(beside: Alpha | None) -> str:
    return "" if beside is None else f"_{beside.type}"


def _repeating(output: Tensor, first: Tensor, second: Tensor) -> str:
    """Return the layout of kernels for an operand that repeats along the leading dimensions, or "" where none does."""
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


def ternary(output: Tensor, first: Tensor, second: Tensor, third: Tensor, name: str) -> None:
    """Launch the kernel `name` over three inputs. Raises NoRule where the release has none for layout and dtypes."""
    count = output.numel()
    _need_any(kernels.release, name)
    inputs = [on_device(each) for each in (first, second, third)]
    casts = any(each.dtype != inputs[0].dtype for each in inputs[1:])
    way = None if all_dense(output, *inputs) else walk(output, *inputs)
    into, of = metal(output.dtype), metal(inputs[0].dtype)
    layout = "dense" if way is None or way.contiguous else "strided"
    kernel = kernels[f"{name}_{layout}_cast_{into}" if casts else f"{name}_{layout}_{into}_{of}"]
    rest: list[Any] = []
    threads: int | tuple[int, int, int] = count
    types = [scalar_type(each) for each in inputs]
    if way is not None and not way.contiguous:
        if kernel.signature.dimensions == 3:  # from 2.15 on: all dimensions but two are the grid's last
            across, down, *deep = (*way.shape, 1)
            threads = (across, down, math.prod(deep))
        rest = [i64(way.shape), *(i64(each) for each in way.strides), u32(len(way.shape))]
        if casts:
            rest.append(u32(*types, scalar_type(output)))
    elif casts:
        rest = [padded(u32([each.element_size() for each in inputs]), 16), padded(u32(types), 16)]
    kernel.launch([output, *inputs, *rest], threads)
