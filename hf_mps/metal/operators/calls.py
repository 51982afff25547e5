"""Calls of operators as the launch rules see them, and how results lie in memory before an operator runs.

A call comes from Python's arguments, or from the simulated device's record; of results PyTorch's Meta kernels tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch

from hf_mps.metal.operators.launch_class import Call, Operand


def call_of(operator: str, inputs: Any, result: Any) -> Call:
    """Return a call by its operator's name, its positional and keyword arguments (`inputs`), and its result."""
    positional, keywords = inputs
    given = (*positional, *keywords.values())
    lists = [each for each in given if isinstance(each, (list, tuple)) and each and isinstance(each[0], torch.Tensor)]
    numbers, lengths = tuple(map(_number, positional)), tuple(map(len, lists))
    return Call(operator, tuple(operands(given)), tuple(operands(result)), numbers, lengths)


@lru_cache(maxsize=65536)
def read(text: str) -> Call:
    """Return the call that a text of the record stands for (simulator/native/calls.cpp)."""
    operator, inputs, lists, arguments = json.loads(text)
    operands = tuple(Operand(dtype, tuple(shape), dense, device) for dtype, shape, dense, device in inputs)
    numbers = tuple(tuple(each) if isinstance(each, list) else each for each in arguments)
    return Call(operator, operands, (), numbers, tuple(lists))


def text_of(call: Call) -> str:
    """Return the text that `read` takes; the results of a call are not in it."""
    return json.dumps([call.operator, list(map(astuple, call.inputs)), call.lists, call.arguments])


def tensors_of(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or results of an operator, in order: `tree_leaves` is slow."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += tensors_of(*tree)
        elif isinstance(tree, dict):
            found += tensors_of(*tree.values())
    return found


def on_device(*trees: Any) -> list[torch.Tensor]:
    """Return those of them that are the device's."""
    return [each for each in tensors_of(*trees) if each.is_mps]


def inputs_of(overload: Any) -> list[tuple[str, str]]:
    """Return name and type of each argument of an overload of torch.ops, out= ones aside."""
    return [(each.name, str(each.type)) for each in overload._schema.arguments if not each.is_out]


def _number(argument: Any) -> int | tuple[int, ...] | None:
    if isinstance(argument, (list, tuple)) and all(isinstance(each, int) for each in argument):
        return tuple(map(int, argument))
    return int(argument) if isinstance(argument, int) else None


def operands(tree: Any) -> Iterator[Operand]:
    """Return the tensors in arguments or results as operands."""
    for leaf in tensors_of(tree):
        last = torch.channels_last if leaf.dim() == 4 else torch.contiguous_format
        dense = leaf.layout != torch.strided or leaf.is_contiguous() or leaf.is_contiguous(memory_format=last)
        yield Operand(str(leaf.dtype).removeprefix("torch."), tuple(map(int, leaf.shape)), dense, leaf.device.type)


ON_METAL = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""Dtypes that Metal does not have, and what a result becomes instead."""
REMEMBERED = 256  # kinds of calls for each operator


@dataclass(frozen=True)
class OutputSpec:
    """Shape, strides in elements and dtype of one result."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        """Return an uninitialised device tensor of this shape, strides and dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="mps")


class OutputSpecs:
    """The specs of one operator's results, for each kind of call."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._known: dict[Any, tuple[OutputSpec, ...] | None] = {}

    def infer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OutputSpec, ...] | None:
        """Return a spec for each result, or None where they depend on the content, or the operator has no meta form."""
        try:
            key = (_key(args), _key(tuple(kwargs.items())))
            if key not in self._known:
                if len(self._known) >= REMEMBERED:
                    self._known.clear()
                self._known[key] = self._run_on_meta(args, kwargs)
            return self._known[key]
        except TypeError:  # an argument that cannot be a key
            return None

    def _run_on_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OutputSpec, ...] | None:
        try:
            result = self._op(*_to_meta(args), **{name: _to_meta(value) for name, value in kwargs.items()})
        except Exception:  # no meta form, a size that depends on the content, or a call that the CPU will refuse
            return None
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(value, torch.Tensor) and value.dtype not in ON_METAL for value in results):
            return None
        return tuple(OutputSpec(value.shape, value.stride(), value.dtype) for value in results)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    """Return a hashable description of everything that decides the specs of the results."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    return type(value), value
