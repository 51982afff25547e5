"""Linear layers with weights in 8 or 4 bits, which are made whole for each product, on every device alike."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.autograd._functions import MatMul8bitFp, MatmulLtState


class Int8Linear(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc]
    """bitsandbytes' layer with the product that it takes on a CPU in training, always and on every device.

    `scales` is a float32 buffer of shape (out_features,): the largest weight of each row, stored as 127. The
    other product (MatMul8bitLt) rounds what goes in to 8 bits too, and waits for the device to look for outliers in it.
    """

    scales: Any

    def __init__(self, layer: Any) -> None:
        """Take over the weights of bitsandbytes' `layer`; their scales become a buffer, which moves with the layer."""
        self.__dict__.update(layer.__dict__)  # with what transformers noted on it; its own __init__ would allocate
        self.register_buffer("scales", self.weight.SCB, persistent=False)
        self.weight.CB = self.weight.SCB = None

    def forward(self, x: Any) -> Any:
        """Return `x` times the weights, (…, out_features) in the dtype of `x`; the gradient is that of whole ones."""
        state = MatmulLtState()
        state.has_fp16_weights, state.CB, state.SCB = False, self.weight.data, self.scales
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return MatMul8bitFp.apply(x, self.weight, None, bias, state)


class UnevenLinear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
    """bitsandbytes' layer for rows that are no whole number of blocks.

    Of those its kernel for x86 (0.50.2, AVX-512) takes other scales than they were rounded with, where a row is a
    multiple of 32: so it gets all weights in rows of a block each.
    """

    def __init__(self, layer: Any) -> None:
        """Take over the weights of bitsandbytes' `layer`."""
        self.__dict__.update(layer.__dict__)

    def forward(self, x: Any) -> Any:
        """Return `x` times the weights, (…, out_features) in the dtype of `x`."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(x.to(dtype), whole(self, dtype), bias).to(x.dtype)


def whole(layer: Any, dtype: Any) -> Any:
    """Return a 4-bit layer's weights as a new tensor, (out_features, in_features) in `dtype`."""
    # A weight that was converted, as by FSDP, has lost its state; the layer still has it (bitsandbytes' modules.py).
    state = copy.copy(getattr(layer.weight, "quant_state", None) or layer.quant_state)
    shape, state.dtype = state.shape, dtype
    if shape[-1] % state.blocksize and not shape.numel() % state.blocksize:
        state.shape = torch.Size((shape.numel() // state.blocksize, state.blocksize))
    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, state).view(shape)
