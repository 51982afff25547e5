"""The bytes of values that a host binds (setBytes), by Metal's types, and the names of dtypes in kernels' names."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


class NoRule(Exception):
    """A call that no rule covers, or a kernel that the release lacks, with the reason: it runs as without kernels."""


DIMENSIONS = 16
"""Dimensions that the arrays in kernels' structs have room for."""
_FORMATS = {
    "u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "u64": "Q", "i64": "q", "f16": "e", "f32": "f"
}  # fmt: skip


def _packed(kind: str, *numbers: float | Sequence[float]) -> bytes:
    if len(numbers) == 1 and isinstance(numbers[0], tuple):  # a tensor's shape or strides: the common case
        return struct.pack(f"<{len(numbers[0])}{_FORMATS[kind]}", *numbers[0])
    # Asking for a Sequence costs three times as much.
    flat = [number for each in numbers for number in (each if isinstance(each, list | tuple) else (each,))]
    return struct.pack(f"<{len(flat)}{_FORMATS[kind]}", *flat)


u8 = partial(_packed, "u8")
"""`uchar` or `bool`."""
u32 = partial(_packed, "u32")
"""`uint`; three of them are no `uint3`, which has 16 bytes (`padded`)."""
i32 = partial(_packed, "i32")
"""`int`."""
u64 = partial(_packed, "u64")
"""`ulong`."""
i64 = partial(_packed, "i64")
"""`long`."""


def f32(*numbers: float | Sequence[float]) -> bytes:
    """`float`; a number beyond its range becomes an infinity, as in C."""
    # Not by struct, which raises OverflowError for what a float does not hold.
    flat = [float(number) for each in numbers for number in (each if isinstance(each, Sequence) else (each,))]
    return bytes((ctypes.c_float * len(flat))(*flat))


def scalar(number: complex, dtype: torch.dtype) -> bytes:
    """Return a number as the kernel's element type has it (getMPSScalar in OperationUtils.mm)."""
    # The program's default device and default dtype, which is any while a model is made, are not to decide.
    kind = torch.complex64 if isinstance(number, complex) else torch.float32 if isinstance(number, float) else None
    return torch.tensor([number], dtype=kind, device="cpu").to(dtype).view(torch.uint8).numpy().tobytes()


def span(tensor: Tensor) -> int:
    """One more than the farthest element's distance from the first, in elements: those that strides pass over count."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def padded(data: bytes, size: int) -> bytes:
    """Return bytes filled up with zeros, for vectors of three and structs with a hole at their end."""
    return data.ljust(size, b"\0")


class Pointers:
    """An argument buffer: the addresses of `tensors` (None is null), padded with nulls to `size` bytes."""

    def __init__(self, tensors: Sequence[Tensor | None], size: int) -> None:
        self.tensors = [tensor for tensor in tensors if tensor is not None]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.data = b"".join(address.to_bytes(8, "little") for address in addresses).ljust(size, b"\0")


METAL = {
    torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat", torch.int64: "long", torch.int32: "int",
    torch.int16: "short", torch.int8: "char", torch.uint8: "uchar", torch.bool: "bool", torch.complex64: "float2",
    torch.complex32: "half2", torch.uint16: "ushort", torch.uint32: "uint", torch.uint64: "ulong",
}  # fmt: skip
"""The names of dtypes in kernels' names (scalarToMetalTypeString in OperationUtils.mm)."""


def metal(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a kernel's name, "bfloat" for torch.bfloat16. Raises NoRule for one Metal lacks."""
    if dtype not in METAL:
        raise NoRule(f"Metal has no {dtype}")
    return METAL[dtype]
