"""Weights in 4 or 8 bits below LoRA's adapters: bitsandbytes', through transformers' own BitsAndBytesConfig.

A layer's weights are rounded on the CPU while they are read, on every device alike, so that the same checkpoint gives
the same bits everywhere and a device never holds a layer whole.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.run.logging import errors_only
from hf_mps.metal.device import precision

if TYPE_CHECKING:
    from hf_mps.finetune.models.checkpoint import Checkpoint

KEY, COMPUTE, KERNELS = "quantization", "compute_dtype", "dequantizing"
Kind = Literal["nf4", "fp4", "int8"]
NF4 = "nf4"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
HUB_MACOS = 26
"""From which on bitsandbytes has kernels from the hub (bitsandbytes#1983)."""
HUB_KERNEL = "kernels-community/bitsandbytes-mps"
MERGE = "hf-mps export merged RUN OUT"
BLOCK = 64
"""Weights in 4 bits that share a scale, one after the other through all rows: what transformers leaves as it is."""
# Where weights of another format come from, in words, by `quant_method` of config.json.
METHODS = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "fp8": "FP8", "mxfp4": "MXFP4", "hqq": "HQQ"}


def compute_dtype(training: Mapping[str, Any], weights: str, device: str) -> Choice[str]:
    """Return the dtype that weights are multiplied in, with the reason: the run's precision, or what the chip computes.

    `training` and `weights` are the recipe's. Over weights in bfloat16 it is bfloat16 where the GPU computes that, and
    float32 where it only emulates it.
    """
    said = [name for name in ("bf16", "fp16") if training.get(name)]
    asked = any(name in training for name in ("bf16", "fp16"))
    run = said[0] if said else "fp32" if asked else precision.default(device).value
    if run != "fp32":
        return Choice(DTYPES[run], f"the run's precision, {run}")
    if device == "cpu":
        return Choice("float32", "the CPU's own precision")
    if weights != "bfloat16":
        return Choice("float32", "the run's precision, fp32, which gives the CPU's losses")
    if device == "mps" and precision.emulates_bfloat16():
        return Choice("float32", "this chip emulates bfloat16 in float32: its products cost the same, and round more")
    return Choice("bfloat16", "that of the weights which stay whole, and this chip computes it")


def config(kind: Kind, dtype: str) -> Any:
    """Return transformers' BitsAndBytesConfig: 4 bits with their scales rounded too (double quantization), or 8.

    Raises UserError where bitsandbytes is not installed.
    """
    import torch
    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise UserError(f"{KEY}: bitsandbytes is not installed; next: {extras.install('quantized')}, or {KEY}=null")
    with extras.unheard("bitsandbytes"), errors_only():
        import bitsandbytes  # noqa: F401

        if kind == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        how = {"bnb_4bit_quant_type": kind, "bnb_4bit_compute_dtype": getattr(torch, dtype)}
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, **how)


def load(checkpoint: Checkpoint, auto_class: str, kind: Kind, dtype: str, **settings: Any) -> tuple[Any, Choice[str]]:
    """Load a model as `Checkpoint.model` does, its linear layers quantized as `kind` and computing in `dtype`.

    It is on the CPU; the run moves it. Raises UserError as `config` and `Checkpoint.model`.
    """
    where = {"quantization_config": config(kind, dtype), "device_map": {"": "cpu"}}
    model, told = checkpoint.model(auto_class, **settings, **where)
    settle(model, dtype)
    return model, told


def refuse_stored(model: str, stored: Mapping[str, Any], kind: str | None) -> None:
    """Raise UserError for a checkpoint whose weights are quantized, unless it is as the recipe's `kind` says.

    `stored` is what its config.json says.
    """
    said = stored.get("quantization_config") or {}
    said = said if isinstance(said, Mapping) else said.to_dict()
    own = f"the model that it was made from, with {KEY}=nf4"
    if "group_size" in (stored.get("quantization") or {}) or (said and "quant_method" not in said and "bits" in said):
        problem = "its weights are in MLX's own format, which PyTorch does not read"
        raise UserError(f"model {model}: {problem}; next: {own}, or mlx_lm.lora")
    if not said:
        return
    method = str(getattr(said.get("quant_method"), "value", said.get("quant_method")))
    if method != "bitsandbytes":
        problem = f"its weights are quantized by {METHODS.get(method, method)}, above which nothing trains here"
        raise UserError(f"model {model}: {problem}; next: {own}")
    have = kind_of(said)
    if kind is None:
        raise UserError(f"model {model}: its weights are {have} of bitsandbytes; next: {KEY}={have} with lora")
    if kind != have:
        raise UserError(f"model {model}: its weights are {have} already, and {KEY} is {kind}; next: {KEY}={have}")


def kind_of(settings: Any) -> str | None:
    """Return which Kind a BitsAndBytesConfig, or what config.json holds of one, says; None for nothing."""
    if settings is None:
        return None
    said = settings if isinstance(settings, Mapping) else settings.to_dict()
    return "int8" if said.get("load_in_8bit") else str(said.get("bnb_4bit_quant_type", "fp4"))


def settle(model: Any, dtype: str) -> None:
    """Let each quantized layer of a loaded model compute in `dtype`, in training and evaluation, on all devices alike.

    bitsandbytes' own 8-bit layers round what goes in to 8 bits too, but not on a CPU in training (`matmul`).
    """
    import bitsandbytes
    import torch

    from hf_mps.finetune.models import rounded_layers

    for name, layer in layers(model).items():
        if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            model.set_submodule(name, rounded_layers.Int8Linear(layer))
            continue
        # The backward pass makes the weights whole again in this dtype, the forward pass in `compute_dtype`.
        layer.weight.quant_state.dtype = getattr(torch, dtype)
        if layer.in_features % BLOCK:
            layer = rounded_layers.UnevenLinear4bit(layer)
            model.set_submodule(name, layer)
        # Else an x86 CPU with bfloat16 products repacks weights at the first evaluation (Linear4bit.forward, 0.50.2),
        # which have no gradient in the training that goes on after it.
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype = getattr(torch, dtype)


def is_quantized(model: Any) -> bool:
    """Return whether a model has weights of bitsandbytes', with adapters or without."""
    return bool(getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False))


@contextmanager
def adapters_kept(model: Any) -> Iterator[None]:
    """Keep the dtype of weights that train: TRL rounds adapters over a quantized model to bfloat16 (DPOTrainer).

    A step of 5e-6 is less than half of what bfloat16 tells apart near most of them, and would be lost.
    """
    trained = [(each, each.data) for each in model.parameters() if each.requires_grad] if is_quantized(model) else []
    yield
    for parameter, data in trained:
        parameter.data = data


def parameters(model: Any) -> int:
    """Return the number of a model's weights; of those in 4 bits two are in a byte."""
    packed = layers(model).values() if is_quantized(model) else ()
    hidden = (layer.in_features * layer.out_features - layer.weight.numel() for layer in packed)
    return int(sum(parameter.numel() for parameter in model.parameters()) + sum(hidden))


def layers(model: Any) -> dict[str, Any]:
    """Return the quantized layers of a model by name."""
    import bitsandbytes

    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def dequantized(layer: Any) -> Any:
    """Return the weights of a quantized layer as it multiplies by them: float32, (out_features, in_features).

    They are a new tensor on the layer's device; the layer is left as it is.
    """
    import bitsandbytes
    import torch

    from hf_mps.finetune.models import rounded_layers

    weight = layer.weight
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        scales = getattr(layer, "scales", None)
        scales = scales if scales is not None else weight.SCB if weight.SCB is not None else layer.state.SCB
        return weight.data.float().mul_(scales.float().unsqueeze(1).mul(1.0 / 127.0))
    return rounded_layers.whole(layer, torch.float32)


def choices(model: Any, kind: Kind, computed: Choice[str], device: str) -> dict[str, Choice[str]]:
    """Return what a run says of its quantized weights: which are, what stays whole, and what computes with them."""
    found = layers(model)
    count = sum(layer.in_features * layer.out_features for layer in found.values())
    bits = "8 bits, a scale for each row" if kind == "int8" else "4 bits, a scale for each 64 of them in 8 bits"
    whole = sorted({name.rpartition(".")[2] for name, _ in _whole(model)})
    dtype = str(next((weight.dtype for _, weight in _whole(model)), "")).removeprefix("torch.")
    rounded = f"{counted(len(found), 'linear layer')}, {count / 1e6:,.1f} M weights in {bits}"
    reason = f"the recipe says so: {rounded}; whole, in {dtype}: {', '.join(whole)}"
    return {KEY: Choice(kind, reason), COMPUTE: computed, KERNELS: _kernels(kind, device)}


def _whole(model: Any) -> list[tuple[str, Any]]:
    """Return the modules that keep whole weights, each with one of them."""
    found = layers(model)
    return [
        (name, weight)
        for name, module in model.named_modules()
        for weight in list(module.parameters(recurse=False))[:1]
        if name not in found and ".lora_" not in name
    ]


def _kernels(kind: Kind, device: str) -> Choice[str]:
    """Return what makes whole weights of quantized ones; nothing is fetched to find out."""
    own = "bitsandbytes' own"
    if kind == "int8":
        return Choice("PyTorch's own", "each row times its scale, for every product anew")
    if device != "mps":
        return Choice(own, f"its kernels for {'CUDA' if device == 'cuda' else 'the CPU'}")
    if int(platform.mac_ver()[0].partition(".")[0] or 0) < HUB_MACOS:
        return Choice(own, f"operators of PyTorch's; {HUB_KERNEL} of the hub needs macOS {HUB_MACOS}")
    if find_spec("kernels") is None:
        return Choice(own, f"operators of PyTorch's; the package kernels, which fetches {HUB_KERNEL}, is not installed")
    return Choice(HUB_KERNEL, f"the hub's, where it has a build for this torch; else {own}, of PyTorch's operators")
