"""The fast path for small tensors, where each microsecond shows: `tensor.cpu()`, the CPU's operator, `.to("mps")`.

A kernel is made here for each shape of schema. What it does not cover it hands to the general kernel: large tensors,
subclasses, what is written with gaps or beside what is read, float64 results. At 1 KB the general kernel
takes 3.4 to 6.7 times as long as PyTorch's fallback, above the bar of 2 in scripts/bench/bench_fallback.py; this one
takes 1.0 to 1.5 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_mps.metal.fallback.accounting import OpStats
from hf_mps.metal.fallback.op_schema import OpSchema

Function = Callable[..., Any]

_MPS = torch.device("mps")
# The methods of the base class: a subclass, or a guard that wraps Tensor.to, has no business in here.
_cpu, _to, _copy = torch._C.TensorBase.cpu, torch._C.TensorBase.to, torch._C.TensorBase.copy_
_modes = torch._C._len_torch_function_stack
_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
# What has no Python of its own that would run inside the kernel; the number of `op(x, 2)` comes as a float.
_ORDINARY = (Tensor, Parameter)


def kernel(schema: OpSchema, stats: OpStats, general: Function, largest: float) -> Function | None:
    """Return the fast kernel of an operator, or None where its schema allows none.

    `general(*args, **kwargs)` runs and books what the fast one does not cover; `largest` in bytes.
    """
    if schema.tensors is None or schema.generator is not None:
        return None
    if not schema.written:
        return _several(schema, stats, general, largest)
    # In-place and out= operators that return nothing but what they wrote.
    if None in schema.returns or not schema.returns:
        return None
    if schema.out_arguments:
        pure = schema.functional is not None and len(schema.written) == len(schema.returns)
        return _out(schema, stats, general, largest) if pure else None
    alone = schema.names[0] in schema.written and len(schema.written) == 1
    return _in_place(schema, stats, general, largest) if alone else None


def _direct(op: Any) -> Function:
    """The quickest function that calls `op`: PyTorch's own Python binding, where the name leaves no other overload."""
    packet = op.overloadpacket
    schemas = {name: getattr(packet, name)._schema for name in packet.overloads()}
    others = [name for name, schema in schemas.items() if not any(argument.is_out for argument in schema.arguments)]
    binding = getattr(torch._C._VariableFunctions, packet.__name__, None)
    if op.namespace == "aten" and len(others) == 1 and others[0] == op._overloadname and binding is not None:
        return binding  # type: ignore[no-any-return]
    return op._op  # type: ignore[no-any-return]


def _several(schema: OpSchema, stats: OpStats, general: Function, largest: float) -> Function:
    """From tensors, some of them optional, to one or more."""
    call, positions, single = _direct(schema.op), schema.tensors or (), len(schema.returns) == 1

    def several(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        # Each operator's first call is the general kernel's, which warns; so is one that a mode would see in here.
        if not stats.calls or _modes():
            return general(*args, **kwargs)
        host_args = list(args)
        copied = _copy_to_host(host_args, positions, largest)
        if copied < 0:
            return general(*args, **kwargs)
        result = call(*host_args, **kwargs)
        # PyTorch's `.to` refuses float64 for Metal by this error: asking each result for its dtype would take longer.
        try:
            back: Any = _to(result, _MPS) if single else tuple([_to(value, _MPS) for value in result])
        except TypeError:  # float64
            return general(*args, **kwargs)
        for value in (back,) if single else back:
            copied += value.nbytes
        stats.book(start, copied)
        return back

    return several


def _out(schema: OpSchema, stats: OpStats, general: Function, largest: float) -> Function:
    """out= operators that have a functional form: its results are copied into the caller's tensors."""
    # The functional form of a structured operator has no kernel and comes here too, with a new output.
    call, positions, outs = _direct(schema.functional), schema.tensors or (), schema.out_arguments
    single = len(schema.returns) == 1

    def out(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        if not stats.calls or _modes():
            return general(*args, **kwargs)
        host_args, host_kwargs = list(args), kwargs.copy()
        targets = [host_kwargs.pop(name) for name in outs]
        copied = _copy_to_host(host_args, positions, largest, targets)
        if copied < 0:
            return general(*args, **kwargs)
        result = call(*host_args, **host_kwargs)
        results = (result,) if single else result
        for target, value in zip(targets, results):  # noqa: B905  one for each
            # Of another size or type, or with gaps: the general way warns, resizes or refuses as the operator does.
            if target.shape != value.shape or target.dtype != value.dtype or not target.is_contiguous():
                return general(*args, **kwargs)
        for target, value in zip(targets, results):  # noqa: B905
            _copy(target, value)
            copied += value.nbytes
        stats.book(start, copied)
        return targets[0] if single else tuple(targets)

    return out


def _in_place(schema: OpSchema, stats: OpStats, general: Function, largest: float) -> Function:
    """In-place on the first argument, with other tensors or without."""
    call, positions = _direct(schema.op), tuple(position - 1 for position in (schema.tensors or ())[1:])

    def in_place(tensor: Tensor, *rest: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        size = tensor.nbytes
        if size > largest or not stats.calls or type(tensor) is not Tensor or not tensor.is_contiguous() or _modes():
            return general(tensor, *rest, **kwargs)
        host_args = list(rest)
        copied = _copy_to_host(host_args, positions, largest, (tensor,)) if positions else 0
        if copied < 0:
            return general(tensor, *rest, **kwargs)
        host = _cpu(tensor)
        call(host, *host_args, **kwargs)
        if host.nbytes != size:  # resized; the device's tensor is as it was
            return general(tensor, *rest, **kwargs)
        _copy(tensor, host)
        stats.book(start, copied + size + size)
        return tensor

    return in_place


def _copy_to_host(args: list[Any], positions: Sequence[int], largest: float, targets: Sequence[Tensor] = ()) -> int:
    """Replace the tensors at `positions` of `args` by CPU copies and return how many bytes those have.

    Returns -1 where one of them is for the general kernel: larger than `largest`, not an ordinary tensor, or over the
    memory of one of `targets`, which the operator writes.
    """
    copied = 0
    for position in positions:
        if position >= len(args):
            break
        tensor = args[position]
        if tensor is None:
            continue
        if type(tensor) not in _ORDINARY or (size := tensor.nbytes) > largest:
            return -1
        for target in targets:
            if _alias(tensor, target):
                return -1
        copied += size
        args[position] = _cpu(tensor)
    return copied
