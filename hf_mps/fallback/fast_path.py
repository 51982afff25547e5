"""The short way for small tensors, where each microsecond shows: `tensor.cpu()`, the CPU's operator, `.to("mps")`.

Each function here is a kernel made for one shape of schema. What it does not cover it hands to the general kernel:
large tensors, tensors on the CPU, subclasses, tensors with gaps or in shared buffers, float64 results. Nothing is
allocated, looked up or called in it that can be left out: scripts/bench_fallback.py shows what each line costs.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_mps.fallback.accounting import Slot, share
from hf_mps.fallback.op_schema import Plan

Function = Callable[..., Any]

_MPS = torch.device("mps")
# The methods of the base class: a subclass, or a guard that wraps Tensor.to, has no business in here.
_cpu, _to, _copy = torch._C.TensorBase.cpu, torch._C.TensorBase.to, torch._C.TensorBase.copy_
_modes = torch._C._len_torch_function_stack
_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
# What has no Python of its own that would run inside the kernel; the number of `op(x, 2)` comes as a float.
_ORDINARY = (Tensor, Parameter)


def kernel(plan: Plan, slot: Slot, general: Function, largest: float) -> Function | None:
    """The short way of an operator, or None where its schema allows none.

    `general(*args, **kwargs)` runs and books what the short way does not cover; `largest` in bytes.
    """
    if plan.tensors is None or plan.generator is not None:
        return None
    if plan.written:
        return _writing(plan, slot, general, largest)
    if plan.tensors == (0,) and len(plan.returns) == 1:
        return _one(plan, slot, general, largest)
    return _several(plan, slot, general, largest)


def _direct(op: Any) -> Function:
    """The quickest function that calls `op`: PyTorch's own Python binding, where the name leaves no other overload."""
    packet = op.overloadpacket
    schemas = {name: getattr(packet, name)._schema for name in packet.overloads()}
    others = [name for name, schema in schemas.items() if not any(argument.is_out for argument in schema.arguments)]
    binding = getattr(torch._C._VariableFunctions, packet.__name__, None)
    if op.namespace == "aten" and len(others) == 1 and others[0] == op._overloadname and binding is not None:
        return binding  # type: ignore[no-any-return]
    return op._op  # type: ignore[no-any-return]


def _one(plan: Plan, slot: Slot, general: Function, largest: float) -> Function:
    """From one tensor, the first argument, to another."""
    call = _direct(plan.op)

    def one(tensor: Tensor, *rest: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        size = tensor.nbytes
        if size > largest or not slot.calls or type(tensor) not in _ORDINARY or _modes():
            return general(tensor, *rest, **kwargs)
        result = call(_cpu(tensor), *rest, **kwargs)
        try:
            back = _to(result, _MPS)
        except TypeError:  # float64
            return general(tensor, *rest, **kwargs)
        slot.calls += 1
        slot.bytes += size + back.nbytes
        now = perf_counter()
        slot.seconds += now - start
        if now > share.due:
            share.judge(now)
        return back

    return one


def _several(plan: Plan, slot: Slot, general: Function, largest: float) -> Function:
    """From several tensors, some of them optional, to one or more."""
    call, positions, single = _direct(plan.op), plan.tensors or (), len(plan.returns) == 1

    def several(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        if not slot.calls or _modes():
            return general(*args, **kwargs)
        over = list(args)
        moved = 0
        for position in positions:
            if position >= len(over):
                break
            tensor = over[position]
            if tensor is None:
                continue
            if type(tensor) not in _ORDINARY or (size := tensor.nbytes) > largest:
                return general(*args, **kwargs)
            moved += size
            over[position] = _cpu(tensor)
        result = call(*over, **kwargs)
        try:
            back: Any = _to(result, _MPS) if single else tuple([_to(value, _MPS) for value in result])
        except TypeError:  # float64
            return general(*args, **kwargs)
        for value in (back,) if single else back:
            moved += value.nbytes
        slot.calls += 1
        slot.bytes += moved
        now = perf_counter()
        slot.seconds += now - start
        if now > share.due:
            share.judge(now)
        return back

    return several


def _writing(plan: Plan, slot: Slot, general: Function, largest: float) -> Function | None:
    """In-place and out= operators that return nothing but what they wrote."""
    if None in plan.returns or not plan.returns:
        return None
    if plan.out_arguments:
        pure = plan.functional is not None and len(plan.written) == len(plan.returns)
        return _out(plan, slot, general, largest) if pure else None
    if plan.names[0] in plan.written and len(plan.written) == 1:
        return _in_place(plan, slot, general, largest)
    return None


def _out(plan: Plan, slot: Slot, general: Function, largest: float) -> Function:
    """out= operators that have a functional form: its results are copied into the caller's tensors."""
    call, positions, outs = _direct(plan.functional), plan.tensors or (), plan.out_arguments
    single = len(plan.returns) == 1

    def out(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        if not slot.calls or _modes():
            return general(*args, **kwargs)
        over, more, moved = list(args), kwargs.copy(), 0
        targets = [more.pop(name) for name in outs]
        for position in positions:
            if position >= len(over):
                break
            tensor = over[position]
            if tensor is None:
                continue
            if type(tensor) not in _ORDINARY or (size := tensor.nbytes) > largest:
                return general(*args, **kwargs)
            for target in targets:
                if _alias(tensor, target):
                    return general(*args, **kwargs)
            moved += size
            over[position] = _cpu(tensor)
        result = call(*over, **more)
        results = (result,) if single else result
        for target, value in zip(targets, results):  # noqa: B905  one for each
            # Of another size or type, or with gaps: the general way warns, resizes or refuses as the operator does.
            if target.shape != value.shape or target.dtype != value.dtype or not target.is_contiguous():
                return general(*args, **kwargs)
        for target, value in zip(targets, results):  # noqa: B905
            _copy(target, value)
            moved += value.nbytes
        slot.calls += 1
        slot.bytes += moved
        now = perf_counter()
        slot.seconds += now - start
        if now > share.due:
            share.judge(now)
        return targets[0] if single else tuple(targets)

    return out


def _in_place(plan: Plan, slot: Slot, general: Function, largest: float) -> Function:
    """In-place on the first argument, with other tensors or without."""
    call, positions = _direct(plan.op), tuple(at - 1 for at in (plan.tensors or ())[1:])

    def in_place(tensor: Tensor, *rest: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        size = tensor.nbytes
        if size > largest or not slot.calls or type(tensor) is not Tensor or not tensor.is_contiguous() or _modes():
            return general(tensor, *rest, **kwargs)
        moved = size + size
        over = list(rest)
        for position in positions:
            if position >= len(over):
                break
            other = over[position]
            if other is None:
                continue
            if type(other) not in _ORDINARY or other.nbytes > largest or _alias(tensor, other):
                return general(tensor, *rest, **kwargs)
            moved += other.nbytes
            over[position] = _cpu(other)
        host = _cpu(tensor)
        call(host, *over, **kwargs)
        if host.nbytes != size:  # resized; the device's tensor is as it was
            return general(tensor, *rest, **kwargs)
        _copy(tensor, host)
        slot.calls += 1
        slot.bytes += moved
        now = perf_counter()
        slot.seconds += now - start
        if now > share.due:
            share.judge(now)
        return tensor

    return in_place
