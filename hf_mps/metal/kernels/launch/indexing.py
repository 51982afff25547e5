"""Reading and writing by tensors of indices: x[i, j], its assignment, and sums into it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.errors import OUTSIDE, errors
from hf_mps.metal.kernels.launch.iterator import result, walk
from hf_mps.metal.kernels.launch.results import fitting
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_repeated, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import Pointers, i64, u32

SOURCE = "operations/Indexing.mm"
MOST = 16
"""Tensors of indices that a kernel takes."""

BYTES = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."
STACK = 6
"""Frames from the warning up to the line that indexes."""

Indices = list[Tensor | None]


class Indexed:
    """A tensor and the indices into it, as kernels take them (AdvancedIndex in TensorAdvancedIndexing.cpp).

    `source` is the tensor seen with the indices' dimensions in place of the indexed ones, at strides of zero; `sizes`
    and `strides` (bytes) are those of the dimensions that are indexed. A kernel is bound `tensor`, whose memory it
    walks with them.
    """

    def __init__(self, tensor: Tensor, indices: Indices) -> None:
        tensor, indices = _adjacent(tensor, _whole(tensor, indices))
        self.tensor = tensor
        there = [dim for dim, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        before, after = there[0], tensor.dim() - there[-1] - 1
        shape, strides = tuple(tensor.shape), tensor.stride()
        taken = tuple(given[0].shape)
        self.sizes = [shape[dim] for dim in there]
        self.strides = [strides[dim] * tensor.element_size() for dim in there]
        if 0 in self.sizes and given[0].numel():
            raise NoRule(OUTSIDE)
        self.whole = tensor
        self.source = tensor.as_strided(
            (*shape[:before], *taken, *shape[len(shape) - after :]),
            (*strides[:before], *(0,) * len(taken), *strides[len(shape) - after :]),
        )
        outer = (*(1,) * before, *taken, *(1,) * after)
        self.indices = [index.reshape(outer) for index in given]
        if len(given) > 1 and len({index.stride() for index in self.indices}) > 1:
            self.indices = [index.contiguous() for index in self.indices]
        if len(self.indices) > MOST:
            raise NoRule("PyTorch refuses that many indices")


@rule("index.Tensor", "index.Tensor_out", source=SOURCE)
def index(release: Release, self: Tensor, indices: Indices, *, out: Tensor | None = None) -> Tensor:
    """A thread for each element of the result. `out` has its shape: PyTorch resizes another."""
    taken = Indexed(self, indices)
    if out is None:
        out = result(self.dtype, taken.source, *taken.indices)
    else:
        refuse_repeated(fitting(out, taken.source.shape, self.dtype, self, *taken.indices))
    if out.numel():
        _launch(release, f"index_select_{_bits(self)}", out, taken.source, taken, out.numel())
    return out


@rule("_index_put_impl_", source=SOURCE)
def index_put(
    release: Release, self: Tensor, indices: Indices, values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    """A thread for each element that is written; one thread where algorithms must be deterministic."""
    refuse_repeated(self)
    if values.device != self.device and values.numel() == 1:
        mask = None if accumulate else _one_mask(self, indices)
        if mask is not None:
            return self.masked_fill_(mask, values.item())
        if values.dim() == 0:
            values = values.to(self.device)
    if values.dtype != self.dtype or values.device != self.device:
        raise NoRule("PyTorch refuses the arguments")
    taken = Indexed(self, indices)
    try:
        values = values.expand(taken.source.shape)
    except RuntimeError:
        raise NoRule("PyTorch refuses the shapes") from None
    threads = values.numel()
    if accumulate:
        kernel = f"index_put_accumulate_{metal(self.dtype)}"
    elif torch.are_deterministic_algorithms_enabled():
        kernel, threads = f"index_put_serial_{_bits(self)}", 1
    else:
        kernel = f"index_put_{_bits(self)}"
    if values.numel():
        _launch(release, kernel, taken.source, values, taken, threads)
    return self


def _launch(release: Release, name: str, output: Tensor, given: Tensor, taken: Indexed, threads: int) -> None:
    way = walk(output, given, taken.indices[0])
    reported = errors()
    release.kernel(name).launch(
        {
            # The whole tensor's memory is bound, of which `source` names the beginning.
            "output": taken.whole if output is taken.source else output,
            "input": taken.whole if given is taken.source else given,
            "indices": Pointers(taken.indices, 8 * len(taken.indices)),
            "sizes": i64(way.shape),
            "output_strides": i64(way.strides[0]),
            "input_strides": i64(way.strides[1]),
            "indices_strides": i64(way.strides[2]),
            "index_sizes": i64(taken.sizes),
            "index_strides": i64(taken.strides),
            "ndim_nindices_numel": u32(len(way.shape), len(taken.indices), output.numel(), 0),
            "error_buffer": reported.tensor,
        },
        threads,
    )
    if reported.any():
        raise NoRule(OUTSIDE)


def _whole(tensor: Tensor, indices: Indices) -> Indices:
    """One tensor of int64, or None, for each dimension: masks become what they count, and all broadcast."""
    found: Indices = []
    for each in indices:
        if each is None or each.dtype not in (torch.bool, torch.uint8):
            found.append(each)
            continue
        if each.shape != tensor.shape[len(found) : len(found) + each.dim()]:
            raise NoRule("PyTorch refuses the mask's shape")
        if each.dtype == torch.uint8:
            warnings.warn(BYTES, UserWarning, stacklevel=STACK)
        found.extend(each.nonzero().unbind(1) if each.dim() else [each.reshape(1).nonzero().reshape(-1)])
        if not each.dim():
            raise NoRule("a mask of no dimensions")
    given = [each for each in found if each is not None]
    if not given or len(found) > tensor.dim():
        raise NoRule("PyTorch refuses the indices")
    if len(given) > 1:
        try:
            given = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise NoRule("PyTorch refuses the shapes") from None
    shared = iter(given)
    found = [None if each is None else _on_device(next(shared), tensor) for each in found]
    return [*found, *(None for _ in range(tensor.dim() - len(found)))]


def _on_device(index: Tensor, tensor: Tensor) -> Tensor:
    if index.dtype == torch.int64 and index.is_mps:
        return index
    if index.dtype not in (torch.int64, torch.int32):
        raise NoRule("PyTorch refuses the indices' dtype")
    return index.to(tensor.device, torch.int64)


def _adjacent(tensor: Tensor, indices: Indices) -> tuple[Tensor, Indices]:
    """The tensor with its indexed dimensions in front where they do not lie side by side (transposeToFront)."""
    there = [dim for dim, index in enumerate(indices) if index is not None]
    if there[-1] - there[0] == len(there) - 1:
        return tensor, indices
    order = there + [dim for dim, index in enumerate(indices) if index is None]
    return tensor.permute(order), [indices[dim] for dim in order]


def _one_mask(tensor: Tensor, indices: Indices) -> Tensor | None:
    """The mask that all indices are together, of the tensor's dimensions (canDispatchToMaskedFill); or None."""
    mask: Tensor | None = None
    dims = 0
    for each in indices:
        if each is None:
            dims += 1
        elif mask is not None or each.dtype not in (torch.bool, torch.uint8) or each.device != tensor.device:
            return None
        else:
            if each.shape != tensor.shape[dims : dims + each.dim()]:
                raise NoRule("PyTorch refuses the mask's shape")
            mask = each
            dims += each.dim()
    if mask is None:
        return None
    return mask.reshape(*mask.shape, *(1 for _ in range(tensor.dim() - dims)))


def _bits(tensor: Tensor) -> str:
    return f"{8 * tensor.element_size()}bit"
