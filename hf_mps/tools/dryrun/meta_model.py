"""A model without weights: its configuration in real size, its parameters fake tensors on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import summary
from hf_mps.finetune import smoke
from hf_mps.finetune.models import checkpoint, diffusion, quantization
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.smoke import processors

PICTURE = 224
AROUND = {
    "SentenceTransformer": "AutoModel",
    "SparseEncoder": "AutoModelForMaskedLM",
    "CrossEncoder": "AutoModelForSequenceClassification",
}
"""The auto class of the architecture inside each of sentence-transformers' models."""


@dataclass(frozen=True)
class MetaCheckpoint(Checkpoint):
    """A checkpoint whose architecture is `size`, a configuration; `source` holds a tiny one's tokenizer or processor.

    On the device `meta` a tensor has a shape and no memory; on `cpu` the model has random weights.
    """

    size: Any = None
    device: str = "meta"

    def config(self) -> Any:
        """Return a new configuration for each caller, who may change it."""
        return copy.deepcopy(self.size)

    def beside(self, name: str) -> Checkpoint:
        """Return another model in its real size, with the tiny one's tokenizer."""
        return replace(self, name=name, size=checkpoint.of_name(name)[0])

    def tokenizer(self, **settings: Any) -> Any:
        """Return the tiny model's tokenizer, which takes rows as long as the real model's."""
        tokenizer = super().tokenizer(**settings)
        tokenizer.model_max_length = int(getattr(self.size, "max_position_embeddings", None) or 2**30)
        return tokenizer

    def image_processor(self) -> Any:
        """The checkpoint's own, which tells the size of its pictures; where that cannot be had, one of that size.

        A configuration that names no size (ResNet's, SegFormer's) stands for the one that the image processor's class
        has by default, at which such models were trained, or ImageNet's PICTURE pixels.
        """
        try:
            return checkpoint.resolve(self.name).image_processor()
        except UserError:
            own = dict(getattr(type(super().image_processor()), "size", None) or {}).get("height") or PICTURE
            smoke.image_processor(Path(self.source), processors.picture(self.size, own))
            return super().image_processor()

    def processor(self, config: Any) -> Any:
        """Return the checkpoint's own; where that cannot be had, one that makes as many tokens of an image.

        `config` is then told the number that stands for an image among the tiny model's words.
        """
        try:
            return checkpoint.resolve(self.name).processor(config)
        except UserError:
            processors.seeing_images(Path(self.source), config)
            made = Checkpoint(self.name, self.source, local=True).processor(config)
            config.image_token_id = made.image_token_id
            return made

    def model(self, auto_class: str, **settings: Any) -> tuple[Any, Choice[str]]:
        """Return the architecture in `dtype`, of the settings or the checkpoint's own.

        Raises UserError where transformers cannot build it.
        """
        import transformers

        config, loader = settings.get("config") or self.config(), getattr(transformers, auto_class)
        dtype = settings.get("dtype", getattr(torch, self.dtype))
        kind = type(config).__name__
        # from_config tells so by a ValueError, as it tells of much else.
        if type(config) not in loader._model_mapping:
            raise UserError(f"model {self.name}: transformers has no {auto_class} for a {config.model_type}")
        try:
            with torch.device(self.device):
                model = loader.from_config(config, dtype=dtype)
        except Exception as error:  # whatever the architecture's own code makes of such a configuration
            why = summary(error)
            raise UserError(f"model {self.name}: transformers cannot build a model from its {kind}: {why}") from error
        if (rounded := settings.get("quantization_config")) is not None:
            quantize(model, rounded)
        count = quantization.parameters(model)
        made = f"{type(model).__name__}, {count / 1e6:.1f} M parameters, without their weights"
        return model, Choice(self.name, made)

    def denoiser(self) -> tuple[Any, Choice[str]]:
        """Return a UNet or transformer of the configuration, in `dtype`."""
        kind = getattr(diffusion.library(), diffusion.CLASSES[diffusion.part_of(self.size)])
        with torch.device(self.device):
            model = kind.from_config(self.size).to(getattr(torch, self.dtype))
        return diffusion.trainable(model), Choice(self.name, f"{type(model).__name__}, without its weights")

    def of_sentence_transformers(self, kind: str, device: str, overrides: Mapping[str, Any] | None = None) -> Any:
        """Return sentence-transformers' model around the architecture, with the tiny one's tokenizer and pooling."""
        config, whole = self.config(), super().of_sentence_transformers(kind, "cpu", overrides)
        if kind == "CrossEncoder":
            config.num_labels = 1
        whole[0].model, _ = self.model(AROUND[kind], config=config)
        return whole


def ignore_moves(models: Iterable[Any]) -> None:
    """Make every `.to()` of `models` do nothing: there is nothing to move.

    Of a model on meta PyTorch could copy nothing, and a fake parameter it cannot exchange in place
    (torch.utils.swap_tensors, "has weakref associated with it").
    """
    for model in models:
        object.__setattr__(model, "to", lambda *args, whole=model, **kwargs: whole)


def make_fake(models: Iterable[Any], mode: FakeTensorMode, device: str) -> None:
    """Put the parameters and buffers of `models` on `device` as fake tensors of `mode`; shared ones stay shared."""
    fakes: dict[int, tuple[Any, Any]] = {}  # with the former tensor, so that its id is not given away

    def fake(tensor: Any) -> Any:
        if id(tensor) not in fakes:
            # As `torch.empty_strided` and `torch.nn.Parameter` would make it under the mode, without operators.
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            new: Any = FakeTensor(mode, shape, torch.device(device))
            if isinstance(tensor, torch.nn.Parameter):
                new.requires_grad_(tensor.requires_grad)
                new._is_param = True
                if (state := getattr(tensor, "quant_state", None)) is not None:
                    new.quant_state = mapped(state, fake)
            fakes[id(tensor)] = (new, tensor)
        return fakes[id(tensor)][0]

    for model in models:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: tensor if tensor is None else fake(tensor) for name, tensor in tensors.items()})


EXPANDED = {f"bitsandbytes::{name}" for name in ("gemm_4bit", "dequantize_4bit", "dequantize_blockwise")}
"""The operators of bitsandbytes that `expanded` knows."""
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
    if not weight.is_meta:
        layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **settings).to("cpu")
        return
    layer.quant_state = _state(weight, layer.weight.quant_type)
    settings |= {"quant_state": layer.quant_state, "bnb_quantized": True}
    packed = weight.new_empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8)
    layer.weight = bitsandbytes.nn.Params4bit(packed, requires_grad=False, **settings)


def _state(weight: Any, kind: str) -> Any:
    """Return the scales of a layer's weights in 4 bits, themselves in 8 (double quantization)."""
    functional: Any = import_module("bitsandbytes.functional")
    blocks = -(-weight.numel() // quantization.BLOCK)

    def numbers(*size: int) -> Any:
        return weight.new_empty(size, dtype=torch.float32)

    scales, table = numbers(-(-blocks // NESTED)), numbers(256)
    nested = functional.QuantState(scales, code=table, blocksize=NESTED, dtype=torch.float32)
    return functional.QuantState(
        weight.new_empty(blocks, dtype=torch.uint8),
        shape=weight.shape,
        code=numbers(16),
        blocksize=quantization.BLOCK,
        quant_type=kind,
        dtype=weight.dtype,
        offset=numbers(),
        state2=nested,
    )


def mapped(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a QuantState whose tensors are what `change` makes of those of `state`."""
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
        if (state := getattr(parameter, "quant_state", None)) is not None:
            found: list[torch.Tensor] = []
            mapped(state, lambda tensor, found=found: found.append(tensor) or tensor)  # type: ignore[misc]
            yield from found


def expanded(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of one of EXPANDED, by the operators of PyTorch that its kernel for mps is made of.

    Those of the packages' own fallback: compiled, or with the kernel from the hub, it holds less on the way.
    """
    from bitsandbytes.backends.default import ops

    name = func.name().partition("::")[2]
    if name == "gemm_4bit":
        return ops._gemm_4bit_default_impl(*args, **kwargs)
    if name == "dequantize_4bit":
        packed, scales, block, _, shape, dtype = args
        table = packed.new_empty(16, dtype=torch.float32)  # bitsandbytes keeps its own, and would keep a fake one
        halves = packed.view(torch.uint8).reshape(-1)
        return ops._dequantize_4bit_compute.__wrapped__(halves, scales, table, block, shape, dtype)
    codes, scales, table, block, dtype = args
    whole = ops._dequantize_blockwise_compute.__wrapped__(codes.reshape(-1), scales, table, block, dtype)
    return whole.reshape(codes.shape)
