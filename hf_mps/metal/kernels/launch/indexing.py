"""Reading and writing by tensors of indices and by masks (x[i, j]), and where a tensor is not zero."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.copies import expanded
from hf_mps.metal.kernels.launch.pointwise import LARGEST_GROUP, broadcast, result, walk
from hf_mps.metal.kernels.rules import OUTSIDE, errors, kernels, refuse, refuse_repeated, refuse_unfit, rule
from hf_mps.metal.kernels.values import NoRule, Pointers, i32, i64, metal, u32, u64

# Host: operations/Indexing.mm.
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
        indices = _whole(tensor, indices)
        there = [dim for dim, index in enumerate(indices) if index is not None]
        if there[-1] - there[0] != len(there) - 1:
            # Indexed dimensions that are not side by side come to the front (transposeToFront).
            order = there + [dim for dim, index in enumerate(indices) if index is None]
            tensor, indices = tensor.permute(order), [indices[dim] for dim in order]
            there = list(range(len(there)))
        self.tensor = tensor
        given = [index for index in indices if index is not None]
        before, after = there[0], tensor.dim() - there[-1] - 1
        shape, strides = tuple(tensor.shape), tensor.stride()
        taken = tuple(given[0].shape)
        self.sizes = [shape[dim] for dim in there]
        self.strides = [strides[dim] * tensor.element_size() for dim in there]
        refuse(0 in self.sizes and given[0].numel(), OUTSIDE)
        self.source = tensor.as_strided(
            (*shape[:before], *taken, *shape[len(shape) - after :]),
            (*strides[:before], *(0,) * len(taken), *strides[len(shape) - after :]),
        )
        outer = (*(1,) * before, *taken, *(1,) * after)
        self.indices = [index.reshape(outer) for index in given]
        if len(given) > 1 and len({index.stride() for index in self.indices}) > 1:
            self.indices = [index.contiguous() for index in self.indices]
        refuse(len(self.indices) > MOST, "PyTorch refuses that many indices")


@rule("index.Tensor", "index.Tensor_out")
def index(self: Tensor, indices: Indices, *, out: Tensor | None = None) -> Tensor:
    """A thread for each element of the result. `out` has its shape: PyTorch resizes another."""
    taken = Indexed(self, indices)
    if out is None:
        out = result(self.dtype, taken.source, *taken.indices)
    else:
        refuse_unfit(out, taken.source.shape, self.dtype, (self, *taken.indices))
        refuse_repeated(out)
    if out.numel():
        _launch(f"index_select_{_bits(self)}", out, taken.source, taken, out.numel())
    return out


@rule("_index_put_impl_")
def index_put(self: Tensor, indices: Indices, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    """A thread for each element that is written; one thread where algorithms must be deterministic."""
    refuse_repeated(self)
    if values.device != self.device and values.numel() == 1:
        mask = None if accumulate else _one_mask(self, indices)
        if mask is not None:
            return self.masked_fill_(mask, values.item())
        if values.dim() == 0:
            values = values.to(self.device)
    refuse(values.dtype != self.dtype or values.device != self.device)
    taken = Indexed(self, indices)
    values = expanded(values, taken.source)
    threads = values.numel()
    if accumulate:
        kernel = f"index_put_accumulate_{metal(self.dtype)}"
    elif torch.are_deterministic_algorithms_enabled():
        kernel, threads = f"index_put_serial_{_bits(self)}", 1
    else:
        kernel = f"index_put_{_bits(self)}"
    if values.numel():
        _launch(kernel, taken.source, values, taken, threads)
    return self


def _launch(kernel: str, output: Tensor, given: Tensor, taken: Indexed, threads: int) -> None:
    way = walk(output, given, taken.indices[0])
    steps = zip(("output_strides", "input_strides", "indices_strides"), way.strides, strict=True)
    arguments: dict[str, Any] = {"sizes": i64(way.shape), **{name: i64(each) for name, each in steps}}
    arguments |= {"index_sizes": i64(taken.sizes), "index_strides": i64(taken.strides)}
    arguments["ndim_nindices_numel"] = u32(len(way.shape), len(taken.indices), output.numel(), 0)
    arguments |= {"indices": Pointers(taken.indices, 8 * len(taken.indices)), "error_buffer": errors.tensor}
    # The whole tensor's memory is bound, of which `source` names the beginning.
    arguments["output"] = taken.tensor if output is taken.source else output
    arguments["input"] = taken.tensor if given is taken.source else given
    kernels[kernel].launch(arguments, threads)
    refuse(errors.any(), OUTSIDE)


def _whole(tensor: Tensor, indices: Indices) -> Indices:
    """Return one tensor of int64, or None, for each dimension: masks become what they count, and all broadcast."""
    found: Indices = []
    for each in indices:
        if each is None or each.dtype not in (torch.bool, torch.uint8):
            found.append(each)
            continue
        refuse(each.shape != tensor.shape[len(found) : len(found) + each.dim()], "PyTorch refuses the mask's shape")
        if each.dtype == torch.uint8:
            warnings.warn(BYTES, UserWarning, stacklevel=STACK)
        found.extend(each.nonzero().unbind(1) if each.dim() else [each.reshape(1).nonzero().reshape(-1)])
        refuse(not each.dim(), "a mask of no dimensions")
    given = [each for each in found if each is not None]
    refuse(not given or len(found) > tensor.dim(), "PyTorch refuses the indices")
    shape = broadcast(*(tuple(each.shape) for each in given))
    shared = iter([each.expand(shape) for each in given])
    found = [None if each is None else _on_device(next(shared), tensor) for each in found]
    return [*found, *(None for _ in range(tensor.dim() - len(found)))]


def _on_device(index: Tensor, tensor: Tensor) -> Tensor:
    if index.dtype == torch.int64 and index.is_mps:
        return index
    refuse(index.dtype not in (torch.int64, torch.int32), "PyTorch refuses the indices' dtype")
    return index.to(tensor.device, torch.int64)


def _one_mask(tensor: Tensor, indices: Indices) -> Tensor | None:
    """Return the mask that all indices are together, of the tensor's dimensions (canDispatchToMaskedFill); or None."""
    given = [(place, each) for place, each in enumerate(indices) if each is not None]
    if len(given) != 1 or given[0][1].dtype not in (torch.bool, torch.uint8) or given[0][1].device != tensor.device:
        return None
    ((before, mask),) = given
    refuse(mask.shape != tensor.shape[before : before + mask.dim()], "PyTorch refuses the mask's shape")
    # The host counts what stands behind the mask as dimensions too, and adds ones for the others alone.
    return mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim() - len(indices) + 1))


def _bits(tensor: Tensor) -> str:
    return f"{8 * tensor.element_size()}bit"


@rule("nonzero")
def nonzero(self: Tensor) -> Tensor:
    """Counts of groups and their running sums, for whose last the host waits; then each element to its place.

    Kernels before 2.14 keep the sums within a group, too; later ones count them again, for tensors of more than 2**32
    elements.
    """
    refuse(self.numel() >= 2**31 - 1, "PyTorch refuses that many elements")
    if self.numel() == 0:
        return torch.empty((0, self.dim()), dtype=torch.int64, device=self.device)
    given, group = self.contiguous(), min(LARGEST_GROUP, self.numel())
    blocks = -(-given.numel() // group)
    older = "prefix_sum_blocks" in kernels
    suffix, number, packed = ("", torch.int32, i32) if older else ("_uint", torch.int64, i64)

    def room(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=given.device)

    within: dict[str, Tensor | bytes] = {"flat_base": u64(0), "block_base": u32(0)}
    if older:
        within = {"prefix": room(given.numel(), torch.int32)}
    of_blocks, offsets, total = room(blocks, torch.int32), room(blocks, number), room(1, number)
    kernel = kernels[f"count_nonzero_prefix_sum_{metal(given.dtype)}{suffix}"]
    kernel.launch({"input": given, "block_sums": of_blocks, **within}, given.numel(), group)
    sums = {"block_sums": of_blocks, "block_offsets": offsets, "total_nonzero": total, "num_blocks": u32(blocks)}
    threads = min(LARGEST_GROUP, -(-blocks // 32) * 32)
    kernels[f"prefix_sum_blocks{suffix}"].launch(sums, threads, threads)
    output = torch.empty((int(total.item()), given.dim()), dtype=torch.int64, device=given.device)
    if output.numel():
        arguments = {"input": given, "output": output, "ndim": i32(given.dim()), "sizes": i64(given.shape)}
        arguments |= {"block_offsets": offsets, "max_entries": packed(len(output)), **within}
        kernel = kernels[f"scatter_nonzero_indices_{metal(given.dtype)}{suffix}"]
        kernel.launch(arguments, given.numel(), group)
    return output


@rule("nonzero.out")
def nonzero_into(self: Tensor, *, out: Tensor) -> Tensor:
    """Into a tensor that takes the result's shape."""
    refuse(out.dtype != torch.int64, "PyTorch refuses the output's dtype")
    found = self.nonzero()
    return out.resize_(found.shape).copy_(found)


@rule("masked_select")
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    """Mask and tensor broadcast, and the mask becomes indices."""
    refuse(mask.dtype != torch.bool or not mask.is_mps, "PyTorch refuses the mask")
    shape = broadcast(tuple(self.shape), tuple(mask.shape)) or (1,)
    return self.expand(shape)[mask.expand(shape)]


@rule("masked_scatter_")
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The source's elements, one after another, where the mask says."""
    if self.dtype != source.dtype or mask.dtype != torch.bool or self.dim() == 0 or not source.is_mps:
        raise NoRule("no dimensions, or what PyTorch refuses")
    where = expanded(mask, self).nonzero().unbind(1)
    refuse(where[0].numel() > source.numel(), "PyTorch refuses the source: it has too few elements")
    if where[0].numel():
        self.index_put_(where, source.flatten()[: where[0].numel()])
    return self
