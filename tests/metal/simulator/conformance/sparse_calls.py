"""Calls of every operator that has a kernel for sparse COO tensors on Metal, for either device.

Most operators take a sparse tensor and numbers: their calls are made from the schema. The others stand in GIVEN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("coalesced", "repeated", "hybrid", "empty")


@dataclass(frozen=True)
class Tensors:
    """Sparse and dense tensors of one kind, dtype and device; `of` is the dtype that rounds their values first."""

    kind: str
    dtype: torch.dtype
    device: str
    of: torch.dtype | None = None

    def sparse(self, scale: float = 1, size: tuple[int, int] = (3, 4)) -> Tensor:
        """A matrix of the kind: without repeated places, with them, of rows (one sparse dimension), or of nothing."""
        indices = {"coalesced": [[0, 1, 2], [2, 0, 1]], "repeated": [[1, 0, 1, 1], [2, 0, 2, 0]], "hybrid": [[2, 0, 2]]}
        values = torch.tensor([0.5, -1.25, 3.0, 2.0]) * scale
        if self.kind == "empty":
            return torch.sparse_coo_tensor(size=size, dtype=self.dtype, device=self.device)
        places = torch.tensor(indices[self.kind])
        values = values[: places.shape[1]]
        if self.kind == "hybrid":
            values = values[:, None] * torch.arange(1, size[1] + 1)
        made = torch.sparse_coo_tensor(places, self._cast(values), size)
        return (made.coalesce() if self.kind == "coalesced" else made).to(self.device)

    def dense(self, *size: int) -> Tensor:
        count = int(torch.tensor(size or (3, 4)).prod())
        values = torch.linspace(-2, 3, count).reshape(size or (3, 4))
        return self._cast(values).to(self.device)

    def _cast(self, values: Tensor) -> Tensor:
        return values.to(self.of or self.dtype).to(self.dtype)

    def index(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    def out(self, layout: torch.layout = torch.sparse_coo, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(3, 4, dtype=dtype or self.dtype, device=self.device, layout=layout)


Given = Callable[[Tensors], tuple[Any, ...]]

# These refuse every sparse COO tensor, on the CPU as on the device.
REFUSE_ALL = {"aten::_to_sparse", "aten::_to_sparse.sparse_dim", "aten::norm.ScalarOpt_dim_dtype"}

GIVEN: dict[str, list[Given]] = {
    "add.Tensor": [lambda t: (t.sparse(), t.sparse(2)), lambda t: (t.dense(), t.sparse())],
    "add_.Tensor": [lambda t: (t.sparse(), t.sparse(2)), lambda t: (t.dense(), t.sparse())],
    "add.out": [lambda t: (t.sparse(), t.sparse(2), t.out()), lambda t: (t.dense(), t.sparse(), t.out(torch.strided))],
    "sub.Tensor": [lambda t: (t.sparse(), t.sparse(2))],
    "sub_.Tensor": [lambda t: (t.sparse(), t.sparse(2))],
    "sub.out": [lambda t: (t.sparse(), t.sparse(2), t.out())],
    "mul.Tensor": [lambda t: (t.sparse(), t.sparse(2)), lambda t: (t.sparse(), t.dense())],
    "mul_.Tensor": [lambda t: (t.sparse(), t.sparse(2)), lambda t: (t.sparse(), t.dense()[0, 0])],
    "mul.out": [lambda t: (t.sparse(), t.sparse(2), t.out())],
    "div.Tensor": [lambda t: (t.sparse(), t.dense()[0, 0])],
    "div_.Tensor": [lambda t: (t.sparse(), t.dense()[0, 0])],
    "div.out": [lambda t: (t.sparse(), t.dense()[0, 0], t.out())],
    "div.Tensor_mode": [lambda t: (t.sparse(), t.dense()[0, 0], {"rounding_mode": "floor"})],
    "div_.Tensor_mode": [lambda t: (t.sparse(), t.dense()[0, 0], {"rounding_mode": "trunc"})],
    "div.out_mode": [lambda t: (t.sparse(), t.dense()[0, 0], t.out(), {"rounding_mode": "floor"})],
    "floor_divide": [lambda t: (t.sparse(), t.dense()[0, 0])],
    "floor_divide_.Tensor": [lambda t: (t.sparse(), t.dense()[0, 0])],
    "floor_divide.out": [lambda t: (t.sparse(), t.dense()[0, 0], t.out())],
    "pow.Tensor_Scalar": [lambda t: (t.sparse(), 2)],
    "pow.Tensor_Scalar_out": [lambda t: (t.sparse(), 3, t.out())],
    **{
        f"{name}.out": [lambda t: (t.sparse(), t.out(dtype=torch.bool))] for name in ("isneginf", "isposinf", "signbit")
    },
    "mm": [lambda t: (t.sparse(), t.dense(4, 2)), lambda t: (t.sparse(), t.sparse(1, (4, 3)))],
    "mm.out": [lambda t: (t.sparse(), t.dense(4, 2), torch.zeros(3, 2, dtype=t.dtype, device=t.device))],
    "mv": [lambda t: (t.sparse(), t.dense(4))],
    "addmm": [lambda t: (t.dense(3, 2), t.sparse(), t.dense(4, 2), {"beta": 2, "alpha": 3})],
    "addmm.out": [lambda t: (t.dense(3, 2), t.sparse(), t.dense(4, 2), t.dense(3, 2))],
    "_sparse_sparse_matmul": [lambda t: (t.sparse(), t.sparse(1, (4, 3)))],
    "bmm": [lambda t: (t.dense(2, 3, 4).to_sparse(), t.dense(2, 4, 2))],
    "bmm.out": [lambda t: (t.dense(2, 3, 4).to_sparse(), t.dense(2, 4, 2), t.dense(2, 3, 2))],
    "cat": [lambda t: ([t.sparse(), t.sparse(2)],), lambda t: ([t.sparse(), t.sparse(2)], 1)],
    "copy_": [lambda t: (t.out(), t.sparse())],
    "copy_sparse_to_sparse_": [lambda t: (t.out(), t.sparse())],
    "index_select": [lambda t: (t.sparse(), 0, t.index(2, 0, 2)), lambda t: (t.sparse(), 1, t.index(1, 2))],
    "narrow_copy": [lambda t: (t.sparse(), 0, 1, 2), lambda t: (t.sparse(), 1, 0, 3)],
    "permute": [lambda t: (t.sparse(), [1, 0])],
    "unsqueeze": [lambda t: (t.sparse(), 0), lambda t: (t.sparse(), -1)],
    "sum.dim_IntList": [lambda t: (t.sparse(), [0]), lambda t: (t.sparse(), [0, 1])],
    "native_norm": [lambda t: (t.sparse(), 2)],
    "native_norm.ScalarOpt_dim_dtype": [lambda t: (t.sparse(), 2, [], False, None)],
    "norm.ScalarOpt_dim": [lambda t: (t.sparse(), 2, [], False)],
    "norm.ScalarOpt_dim_dtype": [lambda t: (t.sparse(), 2, [], False, {"dtype": t.dtype})],
    "_sparse_broadcast_to": [lambda t: (t.sparse(), [2, 3, 4])],
    "_sparse_sum_backward": [
        lambda t: (t.dense(4).to_sparse(), t.sparse(), [0]),
        lambda t: (t.dense(4), t.sparse(), [0]),  # the gradient of a sum over the only sparse dimension is dense
        lambda t: (t.dense(1)[0], t.sparse(), [0, 1]),
    ],
    "_sparse_softmax": [lambda t: (t.sparse(), 1, False), lambda t: (t.sparse(), 0, False)],
    "_sparse_log_softmax": [lambda t: (t.sparse(), 1, False)],
    "_sparse_softmax_backward_data": [lambda t: (t.sparse(2).coalesce(), t.sparse().coalesce(), 1, t.sparse())],
    "_sparse_log_softmax_backward_data": [lambda t: (t.sparse(2).coalesce(), t.sparse().coalesce(), 1, t.sparse())],
    "sparse_mask": [lambda t: (t.dense(), t.sparse().coalesce()), lambda t: (t.sparse(2), t.sparse().coalesce())],
    "_sparse_mask_projection": [lambda t: (t.sparse().coalesce(), t.sparse(2))],
    "sparse_resize_": [lambda t: (t.out(), [5, 6], 2, 0)],
    "sparse_resize_and_clear_": [lambda t: (t.sparse(), [5, 6], 1, 1)],
    "_to_sparse.sparse_dim": [lambda t: (t.sparse(), t.sparse().sparse_dim())],
    "_coalesce": [lambda t: (t.sparse(),)],
    "_coalesced_": [lambda t: (t.sparse(), False)],
    "indices": [lambda t: (t.sparse().coalesce(),)],
    "values": [lambda t: (t.sparse().coalesce(),)],
    "empty_like": [lambda t: (t.sparse(),)],
    "zeros.out": [lambda t: ([5, 6], t.out())],
    "_sparse_coo_tensor_with_dims": [lambda t: (1, 1, [3, 4], _options(t))],
    "_sparse_coo_tensor_with_dims_and_tensors": [
        lambda t: (1, 1, [3, 4], t.index(2, 0)[None], t.dense(2, 4), _options(t))
    ],
    "empty.memory_format": [lambda t: ([3, 4], _options(t))],
    "view_as_real": [lambda t: (t.sparse().to(torch.complex64),)],
    "view_as_complex": [lambda t: (torch.view_as_real(t.sparse().to(torch.complex64)),)],
}


def _options(t: Tensors) -> dict[str, Any]:
    return {"dtype": t.dtype, "layout": torch.sparse_coo, "device": torch.device(t.device)}


def calls(name: str) -> Iterator[Given]:
    """Arguments for the operator "aten::name"; the last may be a dict of keyword arguments."""
    plain = name.removeprefix("aten::")
    if plain in GIVEN:
        yield from GIVEN[plain]
    elif name.endswith("out"):
        yield lambda t: (t.sparse(), t.out())
    else:
        yield lambda t: (t.sparse(),)


def call(name: str, given: Given, tensors: Tensors) -> tuple[Any, ...]:
    """What the operator gives, and its first argument afterwards, which it may have written."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    arguments = list(given(tensors))
    keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    outs = [argument.name for argument in operator._schema.arguments if argument.is_out]
    for out in reversed(outs):
        keywords[out] = arguments.pop()
    with torch.no_grad():
        return operator(*arguments, **keywords), arguments[0] if arguments else None
