"""How an operator's results lie in memory before it runs, as PyTorch's Meta kernels say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ON_METAL = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""Dtypes that Metal does not have, and what a result becomes instead."""
REMEMBERED = 256  # kinds of calls for each operator


@dataclass(frozen=True)
class OutputSpec:
    """Shape, strides in elements and dtype of one result."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
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
        if not all(isinstance(value, Tensor) and value.dtype not in ON_METAL for value in results):
            return None
        return tuple(OutputSpec(value.shape, value.stride(), value.dtype) for value in results)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    """Return a hashable description of everything that decides the specs of the results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    return type(value), value
