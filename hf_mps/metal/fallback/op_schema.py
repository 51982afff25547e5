"""What an operator's schema says about arguments and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_mps.metal.operators.calls import inputs_of

ONE_TENSOR = ("Tensor", "Optional[Tensor]")

# It adds to what its out= tensor holds (aten/src/ATen/native/LinearAlgebra.cpp); all others of aten overwrite it.
ADDS_TO_ITS_OUT = "aten::_compute_linear_combination"


@dataclass(frozen=True)
class OpSchema:
    """One operator: which arguments hold tensors, which are written, and which results are an argument again."""

    op: Any
    names: tuple[str, ...]  # of all arguments, positional ones first
    written: frozenset[str]  # names of the arguments that are written
    returns: tuple[str | None, ...]  # for each result, the written argument that it is, or None
    tensors: tuple[int, ...] | None  # positions of tensors where the rest is plain, None for anything less simple
    takes_tensor: tuple[int, ...]  # positions of all arguments that are one tensor, out= ones left out
    out_arguments: tuple[str, ...]  # names of out= arguments
    generator: str | None = None  # name of the argument that draws random numbers
    out_overload: Any | None = None  # the overload that takes its results' memory, where there is one
    out_names: tuple[str, ...] = ()
    functional: Any | None = None  # of an out= overload, the one that makes its results

    @classmethod
    def of(cls, op: Any) -> OpSchema:
        """Read the schema of `op`, an overload of torch.ops."""
        schema = op._schema
        written = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        sets = {name: each.name for each in written for name in each.alias_info.after_set}
        # A library's out= form may do more than overwrite.
        plain = op.namespace == "aten" and not op.name().startswith(ADDS_TO_ITS_OUT)
        out_overload, out_names = _out_overload(op) if plain and not written else (None, ())
        takes_tensor = tuple(
            index
            for index, argument in enumerate(schema.arguments)
            if str(argument.type) in ONE_TENSOR and not argument.is_out and not argument.kwarg_only
        )
        # An argument or result that needs more than `tensor.cpu()` is for the general kernel.
        others = (each.type for at, each in enumerate(schema.arguments) if not each.is_out and at not in takes_tensor)
        simple = all(map(_plain, others)) and all(str(each.type) == "Tensor" for each in schema.returns)
        return cls(
            op=op,
            names=tuple(argument.name for argument in schema.arguments),
            written=frozenset(each.name for each in written),
            returns=tuple(_returned(value, sets) for value in schema.returns),
            tensors=takes_tensor if simple and schema.returns else None,
            takes_tensor=takes_tensor,
            out_arguments=tuple(argument.name for argument in schema.arguments if argument.is_out),
            generator=next((each.name for each in schema.arguments if "Generator" in str(each.type)), None),
            out_overload=out_overload,
            out_names=out_names,
            functional=_functional_overload(op) if plain and written else None,
        )


def _returned(value: Any, sets: dict[str, str]) -> str | None:
    if value.alias_info is None:
        return None
    return next((sets[name] for name in value.alias_info.after_set if name in sets), None)


def _plain(kind: Any) -> bool:
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    # ScalarType, Layout and MemoryFormat are integers to the type system; a device is its own type.
    return kind.kind() in ("IntType", "SymIntType", "FloatType", "BoolType", "StringType", "NumberType")


def _siblings(op: Any) -> list[Any]:
    """Return the overloads of an operator's name that take the same arguments, out= ones aside, and have a CPU kernel.

    One that PyTorch made up from the functional form would copy its result, and win nothing.
    """
    has, packet = torch._C._dispatch_has_kernel_for_dispatch_key, op.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads() if name != op._overloadname]
    return [other for other in others if inputs_of(other) == inputs_of(op) and has(other.name(), "CPU")]


def _out_overload(op: Any) -> tuple[Any | None, tuple[str, ...]]:
    """Return the out= overload of a functional operator: the same arguments, then one tensor for each result."""
    for other in _siblings(op):
        outs = tuple(argument.name for argument in other._schema.arguments if argument.is_out)
        if outs and len(outs) == len(op._schema.returns):
            return other, outs
    return None, ()


def _functional_overload(op: Any) -> Any | None:
    """Return the overload with the same arguments but the out= ones, where the CPU has a kernel for it."""
    pure = (each for each in _siblings(op) if all(given.alias_info is None for given in each._schema.arguments))
    return next(pure, None)
