"""The names of dtypes in the names of Metal kernels (scalarToMetalTypeString in OperationUtils.mm)."""

from __future__ import annotations

import torch

from hf_mps.metal.kernels.runtime import NoRule

METAL = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int64: "long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "char",
    torch.uint8: "uchar",
    torch.bool: "bool",
    torch.complex64: "float2",
    torch.complex32: "half2",
    torch.uint16: "ushort",
    torch.uint32: "uint",
    torch.uint64: "ulong",
}


def metal(dtype: torch.dtype) -> str:
    """The name of a dtype in a kernel's name, "bfloat" for torch.bfloat16. Raises NoRule for one Metal has not."""
    found = METAL.get(dtype)
    if found is None:
        raise NoRule(f"Metal has no {dtype}")
    return found
