"""Along one dimension by a line of indices: fill, copy, reduce, and from 2.14 on add and select."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.errors import OUTSIDE, errors, refuse_outside
from hf_mps.metal.kernels.launch.cat import wrapped
from hf_mps.metal.kernels.launch.fill import host_number
from hf_mps.metal.kernels.launch.gather_scatter import neutral
from hf_mps.metal.kernels.launch.ranges import GRAPH
from hf_mps.metal.kernels.launch.results import as_self
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, refuse_repeated, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, i64, u32

SOURCE = "operations/Indexing.mm"
DIMENSIONS = 16
REDUCTIONS = ("prod", "mean", "amax", "amin")
FEW = 16
"""Indices are many where a mask of the dimension has at most this many times their number."""
CONTENDED = 16
"""Indices for each place from which sums of half precision are made in float32."""


@rule("index_fill_.int_Scalar", source=SOURCE)
def index_fill(release: Release, self: Tensor, dim: int, index: Tensor, value: complex) -> Tensor:
    """By a mask of the dimension where the indices are many, else a thread for each index and element."""
    number = host_number(value, self.dtype)
    target = self.unsqueeze(-1) if self.dim() == 0 else self
    dim = wrapped(dim, target.dim())
    if index.dim() > 1 or index.dtype != torch.int64 or not index.is_mps:
        raise NoRule("PyTorch refuses the indices")
    index = index.reshape(-1)
    refuse_repeated(target)
    refuse_outside(index, target.shape[dim])
    if target.numel() == 0 or index.numel() == 0:
        return self
    dense = target.is_contiguous() and index.is_contiguous()
    if index.numel() * FEW >= target.shape[dim]:
        _fill_by_mask(release, target, dim, index, number, dense=dense)
    else:
        _fill_each(release, target, dim, index, number, dense=dense)
    return self


@rule("index_fill_.int_Tensor", source="native/TensorAdvancedIndexing.cpp")
def index_fill_with_tensor(release: Release, self: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """The host reads the value, which waits for the device."""
    if value.dim():
        raise NoRule("PyTorch refuses the arguments")
    self.index_fill_(dim, index, value.item())
    return self


def _fill_by_mask(release: Release, target: Tensor, dim: int, index: Tensor, number: bytes, *, dense: bool) -> None:
    size = target.shape[dim]
    mask = torch.empty(size, dtype=torch.bool, device=target.device)
    layout = "dense" if dense else "strided"
    fill = release.kernel(f"index_fill_{layout}_from_mask_{metal(target.dtype)}")
    release.kernel("index_fill_zero_mask").launch({"mask": mask}, size)
    marked = {"mask": mask, "indices": index, "dim_size": i64(size), "indices_stride": i64(index.stride(0))}
    release.kernel("index_fill_set_mask").launch(marked, index.numel())
    arguments = {"output": target, "mask": mask, "fill_val": number}
    if dense:
        inner = math.prod(target.shape[dim + 1 :])
        outer = target.numel() // (size * inner)
        fill.launch(arguments | {"dim_size": u32(size), "inner_size": u32(inner)}, (inner, size, outer))
        return
    sizes = {"sizes": i64(target.shape), "out_strides": i64(target.stride())}
    fill.launch(arguments | sizes | {"dim": u32(dim), "ndim": u32(target.dim())}, target.numel())


def _fill_each(release: Release, target: Tensor, dim: int, index: Tensor, number: bytes, *, dense: bool) -> None:
    size = target.shape[dim]
    slice_numel = target.numel() // size
    arguments = {"output": target, "indices": index, "fill_val": number, "dim_size": i64(size)}
    arguments["slice_numel"] = i64(slice_numel)
    if dense:
        arguments["dim_stride"] = i64(target.stride(dim))
    else:
        arguments |= {
            "dim_out_stride": i64(target.stride(dim)),
            "slice_sizes": _but(target.shape, dim),
            "slice_out_strides": _but(target.stride(), dim),
            "slice_ndim": u32(target.dim() - 1),
            "indices_stride": i64(index.stride(0)),
        }
    layout = "dense" if dense else "strided"
    kernel = release.kernel(f"index_fill_{layout}_{metal(target.dtype)}")
    kernel.launch(arguments, index.numel() * slice_numel)


@out_rule("index_copy", source=SOURCE, outputs=as_self)
def index_copy(release: Release, output: Tensor, self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """A thread for each element of the source."""
    dim = _checked(self, dim, index, source)
    refuse_outside(index, self.shape[dim])
    dense = source.is_contiguous() and output.is_contiguous() and index.is_contiguous()
    layout = "dense" if dense else "strided"
    long_or_int = "long" if index.dtype == torch.int64 else "int"
    bits = 32 if max(each.numel() for each in (output, source, index)) < 2**31 else 64
    kernel = release.kernel(f"index_copy_{layout}_{metal(output.dtype)}_{long_or_int}_{bits}")
    if output is not self:
        output.copy_(self)
    count = index.numel()
    if count == 0 or source.numel() == 0:
        return
    arguments = {"output": output, "source": source, "indices": index, "dim_size": i64(output.shape[dim])}
    each = source.numel() // count
    if dense:
        inner = output.stride(dim)
        kernel.launch(arguments | {"inner": i64(inner), "indices_numel": i64(count)}, (inner, count, each // inner))
        return
    arguments |= {
        "dim_out_stride": i64(output.stride(dim)),
        "dim_source_stride": i64(source.stride(dim)),
        "slice_sizes": _but(output.shape, dim),
        "slice_out_strides": _but(output.stride(), dim),
        "slice_source_strides": _but(source.stride(), dim),
        "slice_ndim": u32(output.dim() - 1),
        "slice_numel": i64(each),
        "indices_stride": i64(index.stride(0)),
    }
    kernel.launch(arguments, count * each)


@out_rule("index_reduce", source=SOURCE, outputs=as_self)
def index_reduce(
    release: Release,
    output: Tensor,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> None:
    """By atomic operations, in no order; a mean divides a sum by a count."""
    if reduce not in REDUCTIONS or index.numel() == 0 or source.numel() == 0:
        raise NoRule("nothing to reduce, or what PyTorch refuses")
    dim = _checked(self, dim, index, source)
    kernel = release.kernel(f"index_reduce_{reduce}_{metal(output.dtype)}_{metal(index.dtype)}")
    refuse_outside(index, self.shape[dim])
    if output is not self:
        output.copy_(self)
    if not include_self:
        output.index_fill_(dim, index.to(torch.int64), neutral(reduce, output.dtype))
    params = _params(output, dim, source, index)
    kernel.launch({"self": output, "index": index, "source": source, "params": params}, source.numel())
    if reduce != "mean":
        return
    count = torch.ones_like(output) if include_self else torch.zeros_like(output)
    count.index_add_(dim, index, torch.ones_like(source))
    count.masked_fill_(count == 0, 1)
    if output.is_floating_point():
        output.div_(count)
    else:
        output.div_(count, rounding_mode="floor")


def _checked(self: Tensor, dim: int, index: Tensor, source: Tensor) -> int:
    """The dimension, counted from the front. Raises NoRule for arguments that PyTorch refuses."""
    dim = wrapped(dim, self.dim())
    shape = list(self.shape)
    if index.dtype not in (torch.int64, torch.int32) or index.dim() > 1 or source.dtype != self.dtype or not shape:
        raise NoRule("no dimensions, or what PyTorch refuses")
    shape[dim] = index.numel()
    if list(source.shape) != shape or not (index.is_mps and source.is_mps):
        raise NoRule("PyTorch refuses the shapes")
    return dim


@out_rule("index_add", source=SOURCE, outputs=as_self)
def index_add(
    release: Release, output: Tensor, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: complex = 1
) -> None:
    """By atomic additions; many for each place are made in float32 where the tensor has half precision."""
    if "index_add_float_long" not in release:
        raise NoRule(GRAPH)
    if torch.are_deterministic_algorithms_enabled():
        raise NoRule("deterministic algorithms, which the host takes another way for")
    dim = _checked(self, dim, index, source)
    whole, given, where = output, source, index.reshape(-1)
    if where.numel() == 0 or given.numel() == 0 or whole.shape[dim] == 0:
        raise NoRule("nothing to add")
    _refuse_reported(release, where, whole.shape[dim])
    if output is not self:
        output.copy_(self)
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
    dtype = whole.dtype
    if where.numel() // whole.shape[dim] >= CONTENDED:
        dtype = wide.get(dtype, dtype)
    sums, parts = whole.to(dtype), given.to(dtype)
    arguments = {"self": sums, "index": where, "source": parts, "params": _params(sums, dim, parts, where)}
    kernel = release.kernel(f"index_add_{metal(dtype)}_{metal(where.dtype)}")
    kernel.launch(arguments | {"alpha": host_number(alpha, dtype)}, parts.numel())
    if dtype != whole.dtype:
        whole.copy_(sums)


@rule("index_select", source=SOURCE)
def index_select(release: Release, self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Into a new tensor: contiguous rows of bytes where all is contiguous, else a thread for each element."""
    if "index_select_dim_32bit_long" not in release:
        raise NoRule(GRAPH)
    dim = wrapped(dim, self.dim())
    if index.dim() > 1 or index.dtype not in (torch.int64, torch.int32) or self.dim() == 0:
        raise NoRule("no dimensions, or what PyTorch refuses")
    where = index.reshape(-1)
    shape = (*self.shape[:dim], where.numel(), *self.shape[dim + 1 :])
    output = torch.empty(shape, dtype=self.dtype, device=self.device)
    if where.numel() == 0:
        return output
    _refuse_reported(release, where, self.shape[dim])
    if self.numel() == 0:
        return output
    kind = metal(where.dtype)
    if self.is_contiguous() and where.is_contiguous():
        size = self.element_size()
        inner = math.prod(self.shape[dim + 1 :]) * size
        offset = self.storage_offset() * size
        unit = next(each for each in (8, 4, 2, 1) if each <= size or not (inner % each or offset % each))
        grid = (inner // unit, where.numel(), self.numel() * size // (self.shape[dim] * inner))
        params = u32(grid[0], self.shape[dim], where.numel(), where.stride(0))
        kernel = release.kernel(f"index_select_dim_dense_{8 * unit}bit_{kind}")
    else:
        grid = (output.numel(), 1, 1)
        params = _params(self, dim, output, where)
        kernel = release.kernel(f"index_select_dim_{8 * self.element_size()}bit_{kind}")
    kernel.launch({"output": output, "index": where, "input": self, "params": params}, grid)
    return output


def _refuse_reported(release: Release, index: Tensor, size: int) -> None:
    """A launch of its own looks at the indices (encodeIndexBoundsCheck)."""
    reported = errors()
    arguments = {"index": index, "index_stride": u32(index.stride(0)), "dim_size": i64(size)}
    kernel = release.kernel(f"index_check_bounds_{metal(index.dtype)}")
    kernel.launch(arguments | {"error_buf": reported.tensor}, index.numel())
    if reported.any():
        raise NoRule(OUTSIDE)


def _params(tensor: Tensor, dim: int, source: Tensor, index: Tensor) -> bytes:
    """IndexReduceParams of kernels/Indexing.h."""
    arrays = (tensor.stride(), tensor.shape, source.stride(), source.shape)
    filled = b"".join(u32(each).ljust(4 * DIMENSIONS, b"\0") for each in arrays)
    return i32(tensor.dim(), dim) + filled + u32(index.stride(0) if index.dim() else 1)


def _but(numbers: tuple[int, ...], dim: int) -> bytes:
    # One dimension leaves nothing, and a buffer has at least one element.
    return i64((*numbers[:dim], *numbers[dim + 1 :])) or i64(0)
