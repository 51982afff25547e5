"""Sizes, strides and dtypes of an operator's results before it runs, found on meta tensors and remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_mps.fallback.host_view import NO_METAL

MOST = 256  # kinds of calls that are remembered for each operator


@dataclass(frozen=True)
class Layout:
    """Size, strides in elements and dtype of a result."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """An uninitialised device tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="mps")


class Layouts:
    """What the results of one operator look like, for each kind of call."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._known: dict[Any, tuple[Layout, ...] | None] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Layout, ...] | None:
        """One layout for each result, or None where they depend on the content or nothing is known of them."""
        try:
            key = (_described(args), _described(tuple(kwargs.items())))
            if key not in self._known:
                if len(self._known) >= MOST:
                    self._known.clear()
                self._known[key] = self._infer(args, kwargs)
            return self._known[key]
        except TypeError:  # an argument that cannot be a key
            return None

    def _infer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Layout, ...] | None:
        try:
            result = self._op(*_on_meta(args), **{name: _on_meta(value) for name, value in kwargs.items()})
        except Exception:  # no meta form, a size that depends on the content, or a call that the CPU will refuse
            return None
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(value, Tensor) and value.dtype not in NO_METAL for value in results):
            return None
        return tuple(Layout(value.shape, value.stride(), value.dtype) for value in results)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _described(value: Any) -> Any:
    """A hashable description of everything that decides the layout of the results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return type(value), value
