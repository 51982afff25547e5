"""Numbers beside a pointwise kernel's operands, and numbers in the place of one, as the host binds them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import padded, scalar, u8

SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.complex32: 8, torch.complex64: 9, torch.bool: 11, torch.bfloat16: 15, torch.uint16: 27, torch.uint32: 28,
    torch.uint64: 29,
}  # fmt: skip
"""c10::ScalarType, by which kernels that cast know a dtype (c10/metal/common.h)."""

INTEGERS = frozenset(dtype for dtype in SCALAR_TYPES if not (dtype.is_floating_point or dtype.is_complex))


class Alpha:
    """A value beside the operands: the bytes that are bound, and the name of its type in the kernel's name."""

    __slots__ = ("data", "type")

    def __init__(self, data: bytes, type: str) -> None:
        self.data, self.type = data, type


@lru_cache(maxsize=1024)
def _number(sign: bool, kind: str, number: complex, dtype: torch.dtype) -> Alpha:
    return Alpha(scalar(number, dtype), metal(dtype))


@lru_cache(maxsize=1024)
def _held(sign: bool, kind: str, number: complex) -> Tensor:
    dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32, "complex": torch.complex64}[kind]
    return torch.tensor(number, dtype=dtype)


def alpha(number: complex, dtype: torch.dtype) -> Alpha:
    """A number of a dtype, as `alpha` or another value beside the operands."""
    # Zeros of both signs are equal, and a cache would give one for the other.
    return _number(str(number).startswith("-"), type(number).__name__, number, dtype)


def params(name: str, dtype: torch.dtype, *numbers: float, truth: bool | None = None) -> Alpha:
    """A struct of numbers of a dtype, as `ELUParams<float>`, with a bool at its end where there is one."""
    data = b"".join(scalar(number, dtype) for number in numbers)
    if truth is not None:
        data = padded(data + u8(truth), len(data) + dtype.itemsize)
    return Alpha(data, f"{name}_{metal(dtype)}")


def one_dtype(kind: str, common: torch.dtype, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A whole number beside a tensor of float or complex64 becomes one of that dtype, and no cast is needed."""
    one, tensor = (first, second) if kind == "dense_scalar_lhs" else (second, first)
    if tensor.dtype != common or one.dtype not in INTEGERS or common not in (torch.float32, torch.complex64):
        return first, second
    one = one.to(common)
    return (one, second) if kind == "dense_scalar_lhs" else (first, one)


def on_device(tensor: Tensor | complex) -> Tensor:
    """A number, Python's or a tensor on the CPU, as it is bound: of float where it is of double."""
    if not isinstance(tensor, Tensor):
        return _held(str(tensor).startswith("-"), type(tensor).__name__, tensor)
    if tensor.is_mps:
        return tensor
    if tensor.dim():
        raise NoRule("PyTorch refuses the arguments: a tensor on the CPU")
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(tensor.dtype)
    return tensor if narrow is None else tensor.to(narrow)


def scalar_type(tensor: Tensor) -> int:
    metal(tensor.dtype)
    return SCALAR_TYPES[tensor.dtype]
