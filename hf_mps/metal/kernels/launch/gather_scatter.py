"""gather, and scatter in its forms: set, add, multiply, largest, smallest, and their mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.errors import OUTSIDE, errors
from hf_mps.metal.kernels.launch.cat import wrapped
from hf_mps.metal.kernels.launch.fill import host_number
from hf_mps.metal.kernels.launch.results import as_self, fitting
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, refuse_repeated, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64, padded, u32

SOURCE = "operations/ScatterGather.mm"
MODES = {"sum": "add", "add": "add", "prod": "prod", "multiply": "prod", "amax": "amax", "amin": "amin", "mean": "add"}
"""The reductions by their names in `scatter` and `scatter_reduce`, and in kernels' names."""


@rule("gather", "gather.out", source=SOURCE)
def gather(
    release: Release, self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, out: Tensor | None = None
) -> Tensor:
    """A thread for each index. `out` has the indices' shape: PyTorch resizes another."""
    if out is None:
        output = torch.empty(index.shape, dtype=self.dtype, device=self.device)
    else:
        refuse_repeated(output := fitting(out, index.shape, self.dtype, self, index))
    given, into, where = _one_dimension(self), _one_dimension(output), _one_dimension(index)
    dim = wrapped(dim, given.dim())
    _refuse(given, dim, where)
    if given.numel() == 0 or where.numel() == 0:
        return output
    same = all(
        mine == theirs for at, (mine, theirs) in enumerate(zip(given.shape, into.shape, strict=True)) if at != dim
    )
    if same and into.is_contiguous() and where.is_contiguous() and given.is_contiguous():
        layout = "dense"
        rest = [_inner(into, dim), i64(into.shape[dim]), i64(given.shape[dim])]
    else:
        layout = "strided"
        rest = [*map(i64, (where.shape, into.stride(), given.stride(), where.stride()))]
        rest += [padded(u32(where.dim(), dim), 16), i64(given.shape[dim])]
    name = f"gather_{layout}_{metal(output.dtype)}_{metal(index.dtype)}"
    _launch(release, name, (into, given, where, *rest, i64(0)), where.numel())
    return output


@out_rule("scatter.src", "scatter.reduce", source=SOURCE, outputs=as_self, reduce=None)
@out_rule("scatter_add", source=SOURCE, outputs=as_self, reduce="add")
def scatter(
    release: Release, output: Tensor, self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str | None
) -> None:
    """Write, add or multiply the source's elements to where the indices say, by atomic operations, in no order."""
    mode = "set" if reduce is None else _mode(reduce)
    _start(output, self)
    _scatter(release, output, dim, index, src, mode)


@out_rule("scatter.value", source=SOURCE, outputs=as_self)
def scatter_value(release: Release, output: Tensor, self: Tensor, dim: int, index: Tensor, value: complex) -> None:
    """Write one number to where the indices say."""
    number = host_number(value, self.dtype)
    _start(output, self)
    into, where = _one_dimension(output), _one_dimension(index)
    dim = wrapped(dim, into.dim())
    _refuse(into, dim, where)
    if into.numel() == 0 or where.numel() == 0:
        return
    if not (into.is_contiguous() and where.is_contiguous() and _same_but(into, where, dim)):
        source = torch.empty(where.shape, dtype=self.dtype, device=self.device).fill_(value)
        _scatter(release, output, dim, index, source, "set")
        return
    name = f"scatter_set_dense_value_{metal(output.dtype)}_{metal(index.dtype)}"
    sizes = (_inner(into, dim), i64(where.shape[dim]), i64(into.shape[dim]))
    _launch(release, name, (into, number, where, *sizes, i64(0)), where.numel())


@out_rule("scatter.value_reduce", source=SOURCE, outputs=as_self)
def scatter_value_reduced(
    release: Release, output: Tensor, self: Tensor, dim: int, index: Tensor, value: complex, *, reduce: str
) -> None:
    """Add or multiply one number to where the indices say."""
    mode = _mode(reduce)
    source = torch.empty(index.shape, dtype=self.dtype, device=self.device).fill_(value)
    _start(output, self)
    _scatter(release, output, dim, index, source, mode)


@out_rule("scatter_reduce.two", source="native/TensorAdvancedIndexing.cpp", outputs=as_self)
def scatter_reduce(
    release: Release,
    output: Tensor,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> None:
    """A reduction into the tensor; without its own elements these begin as the reduction's neutral one."""
    mode = _mode(reduce)
    if reduce == "mean" and output.dtype == torch.bool:
        raise NoRule("PyTorch refuses the reduction")
    _start(output, self)
    if index.numel() == 0:
        return
    if not include_self:
        output.scatter_(dim, index, neutral(reduce, output.dtype))
    _scatter(release, output, dim, index, src, mode)
    if reduce != "mean":
        return
    count = torch.ones_like(output) if include_self else torch.zeros_like(output)
    count.scatter_add_(dim, index, torch.ones_like(src))
    count.masked_fill_(count == 0, 1)
    if output.is_floating_point() or output.is_complex():
        output.div_(count)
    else:
        output.div_(count, rounding_mode="floor")


def _scatter(release: Release, output: Tensor, dim: int, index: Tensor, src: Tensor, mode: str) -> None:
    into, where, given = _one_dimension(output), _one_dimension(index), _one_dimension(src)
    dim = wrapped(dim, into.dim())
    if given.dtype != into.dtype or given.dim() != into.dim():
        raise NoRule("PyTorch refuses the arguments")
    _refuse(into, dim, where)
    if any(mine > theirs for mine, theirs in zip(where.shape, given.shape, strict=True)):
        raise NoRule("PyTorch refuses the shapes")
    if into.numel() == 0 or where.numel() == 0 or given.numel() == 0:
        return
    refuse_repeated(into)
    flips = into.dtype == torch.int64 and mode in ("amax", "amin")
    if flips and not into.is_contiguous():
        raise NoRule("PyTorch refuses the layout")
    dtypes = f"{metal(output.dtype)}_{metal(index.dtype)}"
    if (
        into.is_contiguous()
        and where.is_contiguous()
        and given.is_contiguous()
        and given.shape == where.shape
        and _same_but(into, where, dim)
    ):
        name = f"scatter_{mode}_dense_{dtypes}"
        rest = [_inner(into, dim), i64(where.shape[dim]), i64(into.shape[dim])]
    else:
        name = f"scatter_set_{dtypes}" if mode == "set" else f"scatter_{mode}_strided_{dtypes}"
        rest = [*map(i64, (where.shape, into.stride(), given.stride(), where.stride()))]
        rest += [padded(u32(where.dim(), dim), 16), i64(into.shape[dim])]
    release.kernel(name)
    if flips:
        _flip_signs(release, into)
    _launch(release, name, (into, given, where, *rest, i64(0)), where.numel())
    if flips:
        _flip_signs(release, into)


def _flip_signs(release: Release, tensor: Tensor) -> None:
    """Metal compares 64 bits without a sign only: with it flipped, the order is the same."""
    release.kernel("scatter_signbit_xor_long").launch((tensor, i64(0)), tensor.numel())


def _launch(release: Release, name: str, arguments: tuple[Tensor | bytes, ...], threads: int) -> None:
    if threads >= 2**32 - 1:
        raise NoRule("2**32 elements or more, which the host launches in parts")
    reported = errors()
    release.kernel(name).launch((*arguments, reported.tensor), threads)
    if reported.any():
        raise NoRule(OUTSIDE)


def _start(output: Tensor, self: Tensor) -> None:
    if output is not self:
        output.copy_(self)


def _one_dimension(tensor: Tensor) -> Tensor:
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _refuse(given: Tensor, dim: int, index: Tensor) -> None:
    """Raises NoRule for indices that PyTorch refuses: of another dtype, number of dimensions, or size."""
    if index.dtype not in (torch.int64, torch.int32) or index.dim() != given.dim() or index.dim() > 16:
        raise NoRule("PyTorch refuses the indices")
    if any(mine > theirs for at, (mine, theirs) in enumerate(zip(index.shape, given.shape, strict=True)) if at != dim):
        raise NoRule("PyTorch refuses the shapes")


def _same_but(one: Tensor, other: Tensor, dim: int) -> bool:
    return all(
        at == dim or mine == theirs for at, (mine, theirs) in enumerate(zip(one.shape, other.shape, strict=True))
    )


def _inner(tensor: Tensor, dim: int) -> bytes:
    return i64(math.prod(tensor.shape[dim + 1 :]))


def _mode(reduce: str) -> str:
    if reduce not in MODES:
        raise NoRule("PyTorch refuses the reduction")
    return MODES[reduce]


def neutral(reduce: str, dtype: torch.dtype) -> float:
    """The number that a reduction begins with where a tensor's own are left out."""
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
