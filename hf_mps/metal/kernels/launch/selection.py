"""Along one dimension by indices: gather, scatter in its forms, and fill, copy, reduce, add and select by a line."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.copies import host_number, wrapped
from hf_mps.metal.kernels.rules import OUTSIDE, by_meta, errors, kernels, refuse, refuse_outside, rule
from hf_mps.metal.kernels.values import DIMENSIONS, NoRule, i32, i64, metal, padded, u32

MANY = f"more than {DIMENSIONS} dimensions"

# Host: operations/ScatterGather.mm.
MODES = {"sum": "add", "add": "add", "prod": "prod", "multiply": "prod", "amax": "amax", "amin": "amin", "mean": "add"}
"""The reductions by their names in `scatter` and `scatter_reduce`, and in kernels' names."""
Source = Tensor | complex


@rule("gather", outputs=by_meta)
def gather(output: Tensor, self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> None:
    """A thread for each index."""
    given, into, where = _one_dimension(self, output, index)
    dim = wrapped(dim, given.dim())
    refuse(where.dim() > DIMENSIONS, MANY)
    if given.numel() == 0 or where.numel() == 0:
        return
    dense = _same_but(given, into, dim) and all(each.is_contiguous() for each in (into, where, given))
    name = f"gather_{'dense' if dense else 'strided'}_{metal(output.dtype)}_{metal(index.dtype)}"
    rest = _numbers(into, given, where, dim, given.shape[dim], dense=dense)
    _launch(name, (into, given, where, *rest, i64(0)), where.numel())


def _numbers(into: Tensor, given: Tensor, where: Tensor, dim: int, size: int, *, dense: bool) -> list[bytes]:
    """What a kernel of either layout is told; `size` is of the dimension that the indices are within."""
    if dense:
        return [i64(math.prod(into.shape[dim + 1 :])), i64(where.shape[dim]), i64(size)]
    layout = map(i64, (where.shape, into.stride(), given.stride(), where.stride()))
    return [*layout, padded(u32(where.dim(), dim), 16), i64(size)]


@rule("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", outputs=by_meta, reduce=None)
@rule("scatter_add", outputs=by_meta, reduce="add")
def scatter(output: Tensor, self: Tensor, dim: int, index: Tensor, src: Source, *, reduce: str | None) -> None:
    """Write, add or multiply the source's elements to where the indices say, by atomic operations, in no order."""
    mode = "set" if reduce is None else _mode(reduce)
    if not isinstance(src, Tensor):
        host_number(src, self.dtype)  # a number that PyTorch refuses has no rule, before anything is written
    _start(output, self)
    _scatter(output, dim, index, src, mode)


# Host: native/TensorAdvancedIndexing.cpp.
@rule("scatter_reduce.two", outputs=by_meta)
def scatter_reduce(
    output: Tensor, self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> None:
    """A reduction into the tensor; without its own elements these begin as the reduction's neutral one."""
    mode = _mode(reduce)
    refuse(reduce == "mean" and output.dtype == torch.bool, "PyTorch refuses the reduction")
    _start(output, self)
    if index.numel() == 0:
        return
    if not include_self:
        output.scatter_(dim, index, neutral(reduce, output.dtype))
    _scatter(output, dim, index, src, mode)
    if reduce == "mean":
        count = torch.ones_like(output) if include_self else torch.zeros_like(output)
        count.scatter_add_(dim, index, torch.ones_like(src))
        count.masked_fill_(count == 0, 1)
        # Means of whole numbers are rounded down.
        output.div_(count, rounding_mode=None if output.is_floating_point() or output.is_complex() else "floor")


def _scatter(output: Tensor, dim: int, index: Tensor, src: Source, mode: str) -> None:
    """One number is bound as it is where it is written and all is dense; else a tensor is filled with it."""
    into, where = _one_dimension(output, index)
    dim = wrapped(dim, into.dim())
    refuse(where.dim() > DIMENSIONS, MANY)
    if 0 in (into.numel(), where.numel(), src.numel() if isinstance(src, Tensor) else 1):
        return
    dense = into.is_contiguous() and where.is_contiguous() and _same_but(into, where, dim)
    if isinstance(src, Tensor):
        (given,) = _one_dimension(src)
        dense = dense and given.is_contiguous() and given.shape == where.shape
        bound: Tensor | bytes = given
    elif dense and mode == "set":
        given, bound = into, host_number(src, into.dtype)
    else:
        given = bound = into.new_empty(where.shape).fill_(src)
    flips = into.dtype == torch.int64 and mode in ("amax", "amin")
    refuse(flips and not into.is_contiguous(), "PyTorch refuses the layout")
    layout = "_dense" if dense else "" if mode == "set" else "_strided"
    value = "_value" if isinstance(bound, bytes) else ""
    name = f"scatter_{mode}{layout}{value}_{metal(output.dtype)}_{metal(index.dtype)}"
    rest = _numbers(into, given, where, dim, into.shape[dim], dense=dense)
    kernels[name]  # a kernel that the release lacks is refused here, before any sign is flipped
    if flips:
        _flip_signs(into)
    _launch(name, (into, bound, where, *rest, i64(0)), where.numel())
    if flips:
        _flip_signs(into)


def _flip_signs(tensor: Tensor) -> None:
    """Metal compares 64 bits without a sign only: with it flipped, the order is the same."""
    kernels["scatter_signbit_xor_long"].launch((tensor, i64(0)), tensor.numel())


def _launch(name: str, arguments: tuple[Tensor | bytes, ...], threads: int) -> None:
    refuse(threads >= 2**32 - 1, "2**32 elements or more, which the host launches in parts")
    kernels[name].launch((*arguments, errors.tensor), threads)
    refuse(errors.any(), OUTSIDE)


def _start(output: Tensor, self: Tensor) -> None:
    if output is not self:
        output.copy_(self)


def _one_dimension(*tensors: Tensor) -> list[Tensor]:
    return [each.view(1) if each.dim() == 0 else each for each in tensors]


def _same_but(one: Tensor, other: Tensor, dim: int) -> bool:
    return (*one.shape[:dim], *one.shape[dim + 1 :]) == (*other.shape[:dim], *other.shape[dim + 1 :])


def _mode(reduce: str) -> str:
    refuse(reduce not in MODES, "PyTorch refuses the reduction")
    return MODES[reduce]


def neutral(reduce: str, dtype: torch.dtype) -> float:
    """Return the number that a reduction begins with where a tensor's own are left out."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    largest = reduce == "amin"
    if dtype == torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


# Host: operations/Indexing.mm.
# Half precision is added atomically by compare-and-swap, which repeats where others write the same place; float32 has
# an instruction. From here on a copy in float32 is cheaper (index_add_mps_out).
CONTENDED = 16
"""Indices for each place from which sums of half precision are made in float32."""


@rule("index_copy", outputs=by_meta)
def index_copy(output: Tensor, self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """A thread for each element of the source."""
    refuse(not self.dim(), "no dimensions")
    dim, index = wrapped(dim, self.dim()), index.reshape(-1)
    refuse_outside(index, self.shape[dim])
    dense = source.is_contiguous() and output.is_contiguous() and index.is_contiguous()
    layout = "dense" if dense else "strided"
    long_or_int = "long" if index.dtype == torch.int64 else "int"
    bits = 32 if max(each.numel() for each in (output, source, index)) < 2**31 else 64
    kernel = kernels[f"index_copy_{layout}_{metal(output.dtype)}_{long_or_int}_{bits}"]
    _start(output, self)
    count = index.numel()
    if count == 0 or source.numel() == 0:
        return
    arguments = {"output": output, "source": source, "indices": index, "dim_size": i64(output.shape[dim])}
    each = source.numel() // count
    if dense:
        inner = output.stride(dim)
        kernel.launch(arguments | {"inner": i64(inner), "indices_numel": i64(count)}, (inner, count, each // inner))
        return
    arguments |= {"dim_source_stride": i64(source.stride(dim)), "slice_source_strides": _but(source.stride(), dim)}
    arguments |= {"dim_out_stride": i64(output.stride(dim)), "indices_stride": i64(index.stride(0))}
    arguments |= {"slice_sizes": _but(output.shape, dim), "slice_out_strides": _but(output.stride(), dim)}
    arguments |= {"slice_ndim": u32(output.dim() - 1), "slice_numel": i64(each)}
    kernel.launch(arguments, count * each)


@rule("index_add", outputs=by_meta)
def index_add(output: Tensor, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: complex = 1) -> None:
    """By atomic additions; many for each place are made in float32 where the tensor has half precision."""
    kernels.need("index_add_float_long")
    if torch.are_deterministic_algorithms_enabled():
        raise NoRule("deterministic algorithms, which the host takes another way for")
    refuse(not self.dim(), "no dimensions")
    dim = wrapped(dim, self.dim())
    whole, given, where = output, source, index.reshape(-1)
    refuse(where.numel() == 0 or given.numel() == 0 or whole.shape[dim] == 0, "nothing to add")
    _refuse_reported(where, whole.shape[dim])
    _start(output, self)
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
    dtype = whole.dtype
    if where.numel() // whole.shape[dim] >= CONTENDED:
        dtype = wide.get(dtype, dtype)
    sums, parts = whole.to(dtype), given.to(dtype)
    arguments = {"self": sums, "index": where, "source": parts, "params": _along(sums, dim, parts, where)}
    kernel = kernels[f"index_add_{metal(dtype)}_{metal(where.dtype)}"]
    kernel.launch(arguments | {"alpha": host_number(alpha, dtype)}, parts.numel())
    if dtype != whole.dtype:
        whole.copy_(sums)


@rule("index_select")
def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Into a new tensor: contiguous rows of bytes where all is contiguous, else a thread for each element."""
    kernels.need("index_select_dim_32bit_long")
    dim = wrapped(dim, self.dim())
    if index.dim() > 1 or index.dtype not in (torch.int64, torch.int32) or self.dim() == 0:
        raise NoRule("no dimensions, or what PyTorch refuses")
    where = index.reshape(-1)
    shape = (*self.shape[:dim], where.numel(), *self.shape[dim + 1 :])
    output = torch.empty(shape, dtype=self.dtype, device=self.device)
    if where.numel() == 0:
        return output
    _refuse_reported(where, self.shape[dim])
    if self.numel() == 0:
        return output
    kind = metal(where.dtype)
    if self.is_contiguous() and where.is_contiguous():
        size = self.element_size()
        inner = math.prod(self.shape[dim + 1 :]) * size
        offset = self.storage_offset() * size
        # Rows are copied as they are: by the widest unit that divides them and the place where the tensor begins.
        unit = next(each for each in (8, 4, 2, 1) if each <= size or not (inner % each or offset % each))
        grid = (inner // unit, where.numel(), self.numel() * size // (self.shape[dim] * inner))
        params = u32(grid[0], self.shape[dim], where.numel(), where.stride(0))
        kernel = kernels[f"index_select_dim_dense_{8 * unit}bit_{kind}"]
    else:
        grid = (output.numel(), 1, 1)
        params = _along(self, dim, output, where)
        kernel = kernels[f"index_select_dim_{8 * self.element_size()}bit_{kind}"]
    kernel.launch({"output": output, "index": where, "input": self, "params": params}, grid)
    return output


def _refuse_reported(index: Tensor, size: int) -> None:
    """A separate launch looks at the indices (encodeIndexBoundsCheck)."""
    arguments = {"index": index, "index_stride": u32(index.stride(0)), "dim_size": i64(size)}
    kernel = kernels[f"index_check_bounds_{metal(index.dtype)}"]
    kernel.launch(arguments | {"error_buf": errors.tensor}, index.numel())
    refuse(errors.any(), OUTSIDE)


def _along(tensor: Tensor, dim: int, source: Tensor, index: Tensor) -> bytes:
    """IndexReduceParams of kernels/Indexing.h."""
    arrays = (tensor.stride(), tensor.shape, source.stride(), source.shape)
    filled = b"".join(u32(each).ljust(4 * DIMENSIONS, b"\0") for each in arrays)
    return i32(tensor.dim(), dim) + filled + u32(index.stride(0) if index.dim() else 1)


def _but(numbers: tuple[int, ...], dim: int) -> bytes:
    # One dimension leaves nothing, and a buffer has at least one element.
    return i64((*numbers[:dim], *numbers[dim + 1 :])) or i64(0)
