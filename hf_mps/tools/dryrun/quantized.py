"""A model with quantized weights that has none, and what bitsandbytes' operators make on their way, for a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_mps.finetune.models import quantization

if TYPE_CHECKING:
    import torch

NAMESPACE = "bitsandbytes"
NESTED = 256
"""Scales that share one themselves (bitsandbytes, functional.py, quantize_4bit)."""


def quantize(model: Any, config: Any) -> None:
    """Quantize the linear layers of `model` in place, as from_pretrained does with the BitsAndBytesConfig `config`.

    Of weights on meta there are only the shapes, dtypes and scales that they would have.
    """
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    whole = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map=None)
    for name, layer in quantization.layers(model).items():
        _fill(layer, whole[name])
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def _fill(layer: Any, source: Any) -> None:
    """Give a quantized layer the weights of the one whose place it took; GPT-2's has them the other way round."""
    import bitsandbytes
    import torch

    weight = source.weight.data if isinstance(source, torch.nn.Linear) else source.weight.data.T.contiguous()
    layer.bias = source.bias
    if layer.bias is not None:
        layer.bias.requires_grad_(False)
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        rounded = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        if weight.is_meta:
            rounded.data = torch.empty_like(weight, dtype=torch.int8)
            rounded.CB, rounded.SCB = rounded.data, weight.new_empty(len(weight), dtype=torch.float32)
        layer.weight = rounded if weight.is_meta else rounded.to("cpu")
        return
    settings = dict(layer.weight.__dict__)
    if weight.is_meta:
        state = _state(weight, layer.weight.quant_type)
        packed = weight.new_empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8)
        settings |= {"quant_state": state, "bnb_quantized": True}
        layer.weight, layer.quant_state = bitsandbytes.nn.Params4bit(packed, requires_grad=False, **settings), state
    else:
        layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **settings).to("cpu")


def _state(weight: Any, kind: str) -> Any:
    """The scales of a layer's weights in 4 bits, themselves in 8 (double quantization)."""
    import torch

    from hf_mps.finetune.models import rounded_layers

    functional: Any = import_module("bitsandbytes.functional")
    blocks = -(-weight.numel() // rounded_layers.BLOCK)

    def numbers(*size: int) -> Any:
        return weight.new_empty(size, dtype=torch.float32)

    nested = functional.QuantState(
        numbers(-(-blocks // NESTED)), code=numbers(256), blocksize=NESTED, dtype=torch.float32
    )
    return functional.QuantState(
        weight.new_empty(blocks, dtype=torch.uint8),
        shape=weight.shape,
        code=numbers(16),
        blocksize=rounded_layers.BLOCK,
        quant_type=kind,
        dtype=weight.dtype,
        offset=numbers(),
        state2=nested,
    )


def mapped(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A QuantState whose tensors are what `change` makes of those of `state`."""
    import copy

    made = copy.copy(state)
    for name in ("absmax", "code", "offset"):
        if getattr(state, name, None) is not None:
            setattr(made, name, change(getattr(state, name)))
    if state.state2 is not None:
        made.state2 = mapped(state.state2, change)
    return made


def statistics(model: Any) -> Iterator[torch.Tensor]:
    """The scales and tables of a model's 4-bit weights, which are neither parameters nor buffers of it."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            found: list[torch.Tensor] = []
            mapped(state, lambda tensor, found=found: found.append(tensor) or tensor)  # type: ignore[misc]
            yield from found


def expanded(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of one of bitsandbytes' operators, by the operators of PyTorch that its kernel for mps is made of.

    Those of the packages' own fallback: compiled, or with the kernel from the hub, it holds less on the way.
    """
    import torch
    from bitsandbytes.backends.default import ops

    name = func.name().partition("::")[2]
    if name == "gemm_4bit":
        return ops._gemm_4bit_default_impl(*args, **kwargs)
    if name == "dequantize_4bit":
        packed, scales, block, _, shape, dtype = args
        table = packed.new_empty(16, dtype=torch.float32)  # bitsandbytes keeps its own, and would keep a fake one
        return ops._dequantize_4bit_compute.__wrapped__(
            packed.view(torch.uint8).reshape(-1), scales, table, block, shape, dtype
        )
    if name == "dequantize_blockwise":
        codes, scales, table, block, dtype = args
        whole = ops._dequantize_blockwise_compute.__wrapped__(codes.reshape(-1), scales, table, block, dtype)
        return whole.reshape(codes.shape)
    return func(*args, **kwargs)
