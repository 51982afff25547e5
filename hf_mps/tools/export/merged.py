"""`export merged`: safetensors that load without peft, made shard by shard.

What is held in memory is the model as it was loaded, one shard of the result (twice, while it is written), and one
weight in float32: a 4-bit base is dequantized weight by weight, never whole. scripts/bench/merging.py measures it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.files import write_json
from hf_mps.core.text import gib
from hf_mps.finetune.models import quantization
from hf_mps.finetune.models.lora import plain_name
from hf_mps.finetune.run.logging import errors_only
from hf_mps.tools.export import base
from hf_mps.tools.export.base import BF16, F16, F32, Comparison, Format, Job, difference
from hf_mps.tools.saved.run import SavedRun

if TYPE_CHECKING:
    import torch

SHARD = 10**9
"""Bytes of a shard at most; a larger weight has a shard for itself. A shard is held twice while it is written."""
PATTERN = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weight:
    """A weight of the merged model: its shape, and the call that makes it in float32 or as it is stored."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    floats: bool

    def size(self, width: int) -> int:
        """Bytes on the disk where a float takes `width`; whole numbers keep their type, of eight bytes at most."""
        return math.prod(self.shape) * (width if self.floats else 8)


class Merged(Format):
    """Safetensors that load without peft."""

    name = "merged"
    shapes = ("decoder", "seq2seq", "encoder", "choices", "image")
    weights = (BF16, F16, F32)
    default = "half the bytes of float32 with its range; the dtype that language models are published in"
    packages = ("peft", "safetensors")

    def write(self, job: Job, folder: Path) -> None:
        """Write the merged model into `folder`."""
        layers = save(job.saved, job.model, folder, job.weights)
        none = Choice("none", "the model has none, and its weights alone are written")
        merged = Choice(f"merged into {layers} layers", "added in float32, weight by weight")
        job.choices["adapter"] = merged if layers else none

    def compare(self, job: Job, folder: Path) -> Comparison:
        """Load the folder with transformers and compare its logits with those of base and adapter."""
        import transformers

        dtype = job.choices["compared in"].value
        opened_by = f"transformers {transformers.__version__}"
        needed, free = base.room(job.saved, dtype)
        if needed > free:
            why = f"the merged model takes {gib(needed)} in {dtype}, and {gib(free)} are free"
            return Comparison(opened_by, not_compared=why)
        logits = base.logits(opened(job, folder, dtype), job.batches)
        return Comparison(opened_by, difference(job.reference, logits, job.weights))


def save(saved: SavedRun, model: Any, folder: Path, kind: str, shard: int = SHARD) -> int:
    """Write `model`, its adapter merged, into `folder`, weights as `kind` (bf16, f16, f32), and what it is used with.

    Returns how many layers were merged. Raises UserError for an adapter that is no plain LoRA.
    """
    import torch

    dtype = getattr(torch, base.DTYPES[kind])
    layers = _adapted(model, saved.where)
    plain = base.plain(model)
    folder.mkdir(parents=True, exist_ok=True)
    _write_shards(plain, dict(_weights(plain, layers)), folder, dtype, shard)
    config = copy.deepcopy(plain.config)
    config.dtype, config.architectures = dtype, [type(plain).__name__]
    # The written weights are whole, whatever those of the base were.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with errors_only():
        config.save_pretrained(folder)
        if plain.can_generate():
            plain.generation_config.save_pretrained(folder)
    base.copy_companions(saved, folder)
    return len(layers)


def plain_folder(job: Job, scratch: Path) -> Path:
    """Return a folder with the model in transformers' own form: its own, or `scratch` with the adapter merged."""
    own = job.saved.checkpoint.folder()
    if own is not None and not hasattr(job.model, "peft_config"):
        return own
    # bfloat16 on the way would take three of float16's eleven bits.
    layers = save(job.saved, job.model, scratch, F32 if job.weights in (F32, F16) else BF16)
    job.choices["adapter"] = Choice(f"merged into {layers} layers", "the format holds no adapters")
    return scratch


def plain_model(job: Job, scratch: Path) -> Any:
    """Return the model without adapters and with whole weights in float32: its own, or a merged one from `scratch`."""
    if not hasattr(job.model, "peft_config"):
        return job.model
    save(job.saved, job.model, scratch, F32)
    job.choices["adapter"] = Choice("merged", "the format holds no adapters")
    return opened(job, scratch, "float32")


def opened(job: Job, folder: Path, dtype: str, **settings: Any) -> Any:
    """Return the model in `folder`, loaded as anybody would load it, on the CPU."""
    import torch
    import transformers

    auto_class = getattr(transformers, job.saved.task_class.auto_class)
    with errors_only():
        return auto_class.from_pretrained(folder, dtype=getattr(torch, dtype), **settings).eval()


def _adapted(model: Any, who: str) -> dict[str, Any]:
    """Return peft's layers by their names in the model without adapters. Raises UserError for what is no plain LoRA."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = model.get_base_model().named_modules()
    layers = {name: module for name, module in modules if isinstance(module, BaseTunerLayer)}
    for name, layer in layers.items():
        if not isinstance(layer, LoraLayer) or layer.lora_variant or any(layer.lora_bias.values()):
            what = "a variant of LoRA" if isinstance(layer, LoraLayer) else type(layer).__name__
            raise UserError(
                f"{who}: its adapter holds {what} in {name}, and export merges plain LoRA; next, in Python:"
                " AutoPeftModelForCausalLM.from_pretrained(RUN).merge_and_unload().save_pretrained(OUT)"
            )
    return layers


def _weights(model: Any, layers: Mapping[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of the merged model by name; of tied ones the first, as safetensors asks for."""

    def weight(parameter: Any, packed: Any, adapted: Any) -> Any:
        """Make one weight: of a quantized layer dequantized, and with the adapter's part in float32."""
        made = parameter.data if packed is None else quantization.dequantized(packed)
        if adapted is None:
            return made
        return made.float() + sum(adapted.get_delta_weight(name).float() for name in adapted.active_adapters)

    packed = quantization.layers(model) if quantization.is_quantized(model) else {}  # bitsandbytes' layers by name
    stored = [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        # named_buffers has those too that a state_dict leaves out.
        if name not in module._non_persistent_buffers_set
    ]
    for name, parameter in [*model.named_parameters(), *stored]:
        if (plain := plain_name(name)) is None:
            continue
        owner, _, attribute = name.rpartition(".")
        above = layers.get(owner.removesuffix(".base_layer")) if owner.endswith(".base_layer") else None
        if above is not None and attribute != getattr(above, "parameter_name", "weight"):
            above = None
        layer = packed.get(owner) if attribute == "weight" else None
        shape = (layer.out_features, layer.in_features) if layer else tuple(parameter.shape)
        floats = layer is not None or parameter.is_floating_point()
        yield plain, Weight(shape, partial(weight, parameter, layer, above), floats)


def _write_shards(model: Any, weights: dict[str, Weight], folder: Path, dtype: Any, shard: int) -> None:
    """Write the weights one shard after the other, under the names that they have on the hub, and the index."""
    from huggingface_hub import split_state_dict_into_shards_factory

    # Weights that are tied or computed, which save_pretrained leaves out too.
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: weight for name, weight in weights.items() if name not in ignored}
    split: Any = split_state_dict_into_shards_factory(
        kept,
        get_storage_size=lambda weight: weight.size(dtype.itemsize),
        filename_pattern=PATTERN,
        max_shard_size=shard,
    )
    places: dict[str, str] = {}
    total = 0
    for file, names in split.filename_to_tensors.items():
        stored = _write_shard(model, {name: kept[name] for name in names}, folder / file, dtype)
        places |= dict.fromkeys(stored, file)
        total += sum(stored.values())
    if len(split.filename_to_tensors) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _write_shard(model: Any, weights: Mapping[str, Weight], file: Path, dtype: Any) -> dict[str, int]:
    """Write one shard, and return the bytes of each weight in it; none of them is held afterwards."""
    import torch
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {}
    # One weight after the other: what is in float32 is freed before the next one is made.
    with torch.no_grad():
        for name, weight in weights.items():
            made = weight.make()
            tensors[name] = (made.to(dtype) if made.is_floating_point() else made).contiguous().cpu()
    # transformers fuses some weights as it loads (experts of a mixture): the hub's names and shapes come back.
    stored = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, tensors).items()}
    save_file(stored, file, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in stored.items()}
