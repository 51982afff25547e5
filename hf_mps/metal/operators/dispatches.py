"""What the host encodes for one call: dispatches of kernels, runs of MPSGraphs and blits, in their order.

Each rule names the file of PyTorch's sources that it is read from (in aten/src/ATen/native/mps/operations, where no
folder is named), and was compared with the calls that the functions of 2.13.0's, 2.14.1's and 2.15.0's wheels make. An
MPSGraph is one launch here; how many kernels Apple's framework encodes for it is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import TYPE_CHECKING

from packaging.version import Version

from hf_mps.metal.operators.launch_rules import VECTORS

if TYPE_CHECKING:
    from hf_mps.metal.operators.launch_class import Call, LaunchClass, LaunchTable, Operand

CHUNK, GROUPS, TENSORS = 65536, 32, 32
"""Elements that a threadgroup does, and the threadgroups and tensors of a dispatch at most (MultiTensorApply.h)."""

Parts = tuple["LaunchClass", ...]


@lru_cache(maxsize=65536)
def encoded(call: Call, table: LaunchTable) -> Parts:
    """The classes of all that a call encodes, in order; nothing of a view or a call of the CPU."""
    kind, rule = table.of(call).value, PARTS.get(call.base)
    if kind in ("view", "cpu"):
        return ()
    if call.base.startswith("_foreach") and call.lists:
        return (kind,) * call.lists[0]  # native/ForeachOpsKernels.cpp loops: Metal has no kernels for lists, as of 2.15
    try:
        return (kind,) if rule is None else rule(call, kind, table)
    except (IndexError, TypeError):  # called with fewer arguments than the rule knows of
        return (kind,)


def encoders(sequence: Iterable[Parts]) -> int:
    """How many command encoders some calls need, one after the other (aten/src/ATen/mps/MPSStream.mm).

    Kernels share one until something else ends it: a graph, which makes its own, or a blit; the blits of one call share
    theirs. MPSNDArrayMatrixMultiplication begins one, which the kernels after it use (Linear.mm).
    """
    count, computing = 0, False
    for parts in sequence:
        before: LaunchClass | None = None
        for kind in parts:
            shared = computing if kind == "metal" else kind == before == "blit"
            count += not shared
            computing, before = kind in ("metal", "framework"), kind
    return count


def multi_tensor(sizes: Iterable[int], *, alone: bool = False) -> int:
    """The dispatches for tensors of so many elements; with `alone` none serves two of them (MultiTensorApply.h)."""
    dispatches = groups = tensors = 0
    for chunks in (ceil(size / CHUNK) for size in sizes if size):
        tensors += 1
        full, groups = divmod(groups + chunks, GROUPS)
        dispatches += full
        if full:  # a dispatch that ends with its tensor leaves none in the next one's list
            tensors = bool(groups)
        if groups and (alone or tensors == TENSORS):
            dispatches, groups, tensors = dispatches + 1, 0, 0
    return dispatches + bool(groups)


def _class(table: LaunchTable, operator: str, call: Call) -> LaunchClass:
    return table.of(replace(call, operator=f"aten::{operator}")).value


def _first_list(call: Call) -> Sequence[Operand]:
    return call.inputs[: call.lists[0]]


def _sizes(operands: Iterable[Operand]) -> list[int]:
    return [prod(each.shape) for each in operands]


def _joined(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Shape.mm, `cat_out_mps`: a dispatch, or a blit, for each input that is not empty (pytorch#188198)."""
    return (kind,) * sum(size > 0 for size in _sizes(_first_list(call)))


def _fused(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    return (kind,) * multi_tensor(_sizes(_first_list(call)))


def _unscaled(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Amp.mm: dense gradients chunk by chunk, others by a kernel for each."""
    grads = _first_list(call)
    dense = multi_tensor(_sizes(each for each in grads if each.dense), alone=True)
    return (kind,) * (dense + sum(not each.dense for each in grads))


def _gradients(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Linear.mm, Convolution.mm: one for the input, one for the weight; the bias's is a sum.

    Before 2.14 that sum is in the graph of a linear layer's weight, which is run for either of the two.
    """
    mask = call.arguments[-1]
    of_input, of_weight, *of_bias = mask if isinstance(mask, tuple) else (1, 1, 1)
    linear, bias = call.base == "linear_backward", any(of_bias)
    products = (kind,) * (of_input + (of_weight or (linear and bias)))
    apart = bias and not (linear and Version(table.release) < VECTORS)
    return (*products, _class(table, "sum.dim_IntList", call)) if apart else products


def _summed_in_rows(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Embedding.mm: zeros, and a kernel that adds to them."""
    return ("metal", kind) if kind == "metal" else (kind,)


def _copied(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """Copy.mm: between host and device a blit; a strided or other dtype's is brought into shape on the device."""
    source, target = (call.inputs[1], call.inputs[0]) if call.base == "copy" else (call.inputs[0], call.results[0])
    if source.device == target.device:
        return (kind,)
    if target.device == "mps":
        return (kind,) if target.dense else (kind, "metal")
    return (kind,) if source.dtype == target.dtype and source.dense else ("metal", kind)


def _zeros_and_copy(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """aten/src/ATen/native/TensorShape.cpp: zeros, and a copy into a part of them, which is dense in the first rows."""
    dim, *step = (each for each in call.arguments[2:6:3] if isinstance(each, int))
    result = call.results[0].shape
    ahead = prod(result[: dim % len(result)])
    dense = ahead == 1 and call.inputs[0].dense and call.base != "diagonal_backward" and step in ([], [1])
    return ("metal", "blit" if dense else "metal")


def _looked_up(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """aten/src/ATen/native/Embedding.cpp: numbers that are not dense, as expanded positions, are laid out first."""
    return (kind,) if call.inputs[1].dense else ("metal", kind)


def _made_safe(call: Call, kind: LaunchClass, table: LaunchTable) -> Parts:
    """aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax`."""
    made_of = ("_softmax", "isneginf", "all.dim", "scalar_tensor", "where.self")
    return tuple(_class(table, operator, call) for operator in made_of)


PARTS: Mapping[str, Callable[[Call, LaunchClass, LaunchTable], Parts]] = {
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("_fused_adam", "_fused_adamw", "_fused_sgd"), _fused),
    "_amp_foreach_non_finite_check_and_unscale": _unscaled,
    **dict.fromkeys(("linear_backward", "convolution_backward"), _gradients),
    **dict.fromkeys(("mps_convolution_backward", "mps_convolution_transpose_backward"), _gradients),
    "embedding": _looked_up,
    "embedding_dense_backward": _summed_in_rows,
    **dict.fromkeys(("copy", "clone", "_to_copy", "_copy_from", "_copy_from_and_resize"), _copied),
    **dict.fromkeys(("select_backward", "slice_backward", "diagonal_backward"), _zeros_and_copy),
    "_safe_softmax": _made_safe,
}
"""Operators whose calls may encode more than one of their class, or several classes."""
