"""Collectives on the CPU as Gloo has them, and what it has not: other dtypes, odd sizes, one-line refusals, slices.

Gloo works on float64, float32, float16, bfloat16, int64, int32, int8, uint8 and bool and says "Invalid scalar type" for
the rest (ProcessGroupGloo.cpp, GENERATE_ALL_TYPES). To move bytes no arithmetic is needed: there the others go as
uint8. Its all-gather, reduce-scatter and all-to-all of lists want equal sizes, and NCCL's do not. It reads and writes
as many elements as a tensor has from its first one on, whatever its strides are (getDataPointers): a slice of a larger
tensor would lose what is beside it, so it is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._pytree import tree_map_only

from hf_mps.metal.fallback.host_view import NotShared, host_alias
from hf_mps.metal.operators.calls import tensors_of


class HostSide:
    """What Gloo gets for the tensors of one call, and what has to be done when it is through."""

    def __init__(self) -> None:
        self._on_host: list[Callable[[], object]] = []
        self._on_device: list[Callable[[], object]] = []

    @property
    def needs_device(self) -> bool:
        """Return whether results are copied to the device at the end, which only a thread that may use it can do."""
        return bool(self._on_device)

    def of(self, value: Any, *, read: bool, written: bool) -> Any:
        """Return the CPU's side of an argument: of a tensor, or of lists of them; anything else passes through.

        What is not `read` is only made as large; what is `written` gets its result by `end`.
        """
        if isinstance(value, list | tuple):
            return [self.of(each, read=read, written=written) for each in value]
        return self._tensor(value, read, written) if isinstance(value, Tensor) and value.is_mps else value

    def end(self) -> None:
        """Bring the results where they belong; once Gloo is through."""
        for bring in (*self._on_host, *self._on_device):
            bring()
        self._on_host.clear()
        self._on_device.clear()

    def _tensor(self, tensor: Tensor, read: bool, written: bool) -> Tensor:
        alias = None  # a CPU tensor over the memory of the device's
        if tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg():
            with suppress(NotShared):
                alias = host_alias(tensor)
        if alias is not None and alias.is_contiguous():
            return alias
        there = tensor if alias is None else alias
        host = there.cpu() if read or there.is_sparse else torch.empty(there.shape, dtype=there.dtype)
        host = host if there.is_sparse else host.contiguous()
        if written:
            (self._on_device if alias is None else self._on_host).append(lambda: there.copy_(host))
        return host


_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
GLOOS = frozenset(getattr(torch, name) for name in _NAMES)
"""The dtypes that Gloo reduces; those of torch 2.13."""


IN_A_ROW = (
    *("_allgather_base_", "_reduce_scatter_base_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"),
)
"""Those of one tensor for all ranks' parts. Only how many elements it has matters to NCCL, and so to Accelerate, which
gives a flat one; Gloo compares shapes."""


@dataclass
class Started:
    """Works of Gloo's that together are one collective, and what is to be done when they are through."""

    works: list[Any]
    end: Callable[[], object] = field(default=lambda: None)


def start(name: str, operator: Any, arguments: dict[str, Any]) -> Started:
    """Start the c10d operator `name` on CPU tensors, given by its arguments' names.

    Raises torch.distributed.DistBackendError for a reduction of a dtype that Gloo has no arithmetic for, and what the
    operator raises.
    """
    if "reduce" in name:
        for tensor in tensors_of(*arguments.values()):
            if tensor.dtype not in GLOOS and not tensor.is_complex():
                known = ", ".join(sorted({*_NAMES} - {"float64"}))
                raise torch.distributed.DistBackendError(
                    f"{name.strip('_')} of {str(tensor.dtype).removeprefix('torch.')} tensors: Gloo, which the backend "
                    f"metal hands them to, reduces {known}; next: tensor.to() one of these"
                )
    else:
        arguments = tree_map_only(Tensor, _as_bytes, arguments)
    if name == "allgather_" and _uneven(arguments["output_tensors"][0]):
        return _gather_uneven(arguments)
    if name == "reduce_scatter_" and _uneven(arguments["input_tensors"][0]):
        return _scatter_uneven(arguments)
    if name in IN_A_ROW:
        # Gloo compares shapes, where NCCL compares how many elements there are.
        arguments = tree_map_only(Tensor, lambda tensor: tensor.view(-1), arguments)
    # Always, as no rank can know whether the others' sizes are equal.
    if name == "alltoall_":
        return _exchange(arguments)
    return Started([_work(operator(*arguments.values()))])


def _work(result: Any) -> Any:
    """Return the work that an operator of c10d returns, alone or last of a tuple."""
    return Work.unbox(result[-1] if isinstance(result, tuple) else result)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor of another dtype than Gloo's as bytes over the same memory, with one dimension more."""
    return tensor if tensor.dtype in GLOOS else tensor.unsqueeze(-1).view(torch.uint8)


def _uneven(tensors: list[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) > 1


def _gather_uneven(arguments: dict[str, Any]) -> Started:
    """Start an all-gather in which the ranks' tensors differ in size: one broadcast from each rank."""
    (outputs,), (mine,), group = (arguments[key] for key in ("output_tensors", "input_tensors", "process_group"))
    outputs[ProcessGroup.unbox(group).rank()].copy_(mine)
    send = torch.ops.c10d.broadcast_.default
    return Started([_work(send([output], group, root, 0)) for root, output in enumerate(outputs)])


def _scatter_uneven(arguments: dict[str, Any]) -> Started:
    """Start a reduce-scatter in which the ranks' parts differ in size: one reduction to each rank."""
    names = ("output_tensors", "input_tensors", "process_group", "reduce_op")
    (output,), (inputs,), group, how = (arguments[key] for key in names)
    # Gloo adds up in the tensors that it is given, and these are the caller's.
    parts = [part.clone() for part in inputs]
    add = torch.ops.c10d.reduce_.default
    works = [_work(add([part], group, how, root, 0)) for root, part in enumerate(parts)]
    mine = parts[ProcessGroup.unbox(group).rank()]
    return Started(works, lambda: output.copy_(mine))


def _exchange(arguments: dict[str, Any]) -> Started:
    """Start an all-to-all of lists whose tensors may differ in size: one of a row, cut by their sizes."""
    outputs, inputs, group = (arguments[key] for key in ("output_tensors", "input_tensors", "process_group"))
    row = torch.cat([part.reshape(-1) for part in inputs])
    sizes = [output.numel() for output in outputs]
    arrived = row.new_empty(sum(sizes))

    def cut() -> None:
        for output, part in zip(outputs, torch.split(arrived, sizes), strict=True):
            output.copy_(part.view(output.shape))

    send = torch.ops.c10d.alltoall_base_.default
    return Started([_work(send(arrived, row, group, sizes, [part.numel() for part in inputs]))], cut)
