"""LoRA through peft: the layers that carry an adapter, the parameters that train, and what is saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.recipe import schema

ALL_LINEAR = "all-linear"
SHOWN = 8


class Lora(schema.Section):
    """Keys of peft's LoraConfig under their own names, and `export`: what the output folder holds.

    `target_modules` is `all-linear` (each linear layer but the output layer, as QLoRA found it necessary to match full
    fine-tuning, arXiv 2305.14314, section 4) or a list of module names. `merged` writes a model that loads without
    peft, `adapter` the adapter alone.
    """

    r: int = Field(default=16, ge=1)
    """The rank of the adapters."""
    lora_alpha: float = Field(default=32, gt=0)
    """The adapters are scaled by lora_alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    every: ClassVar[tuple[str, ...]] = (ALL_LINEAR,)
    """What stands for every linear layer."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """The layers that get adapters."""
    use_rslora: bool = False
    """true scales by lora_alpha / sqrt(r)."""
    export: Literal["merged", "adapter"] = "merged"
    """What is saved: a whole model, or the adapter alone."""


def apply(
    model: Any, lora: Lora, task_type: str | None, *, checkpointed: bool = False, part: str | None = None
) -> tuple[Any, Choice[str]]:
    """Return the model with adapters, its own weights frozen, and a choice that names the adapted layers.

    With `checkpointed` the model's blocks recompute their activations in the backward pass. Adapters are given to the
    module `part` alone where it is named, as `named_modules` has it. Raises UserError where peft is not installed or
    the model (its `part`) has none of `target_modules`.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError(f"lora: peft is not installed; next: {extras.install('lora')}, or lora=null") from error
    # peft annotates lora_alpha as an integer, and only divides by it.
    lora_config = LoraConfig(task_type=task_type, **lora.model_dump(exclude={"export"}))
    inside = model if part is None else model.get_submodule(part)
    modules = dict(inside.named_modules())
    weighted = (path for path, module in modules.items() if getattr(module, "weight", None) is not None)
    layer_names = {path.rpartition(".")[2] for path in weighted}
    # peft takes a list with one match, and would train less in silence.
    for name in lora.target_modules if isinstance(lora.target_modules, list) else ():
        if name not in layer_names and not any(path == name or path.endswith(f".{name}") for path in modules):
            allowed = ", ".join([*lora.every, *sorted(layer for layer in layer_names if not layer.isdecimal())])
            told = f"lora.target_modules has '{name}', and {type(inside).__name__} has no such layer"
            raise UserError(f"{told}; allowed: {allowed}{nearest(name, layer_names)}")
    if part is not None:
        import torch

        # peft's pattern (re.fullmatch of a layer's path) for layers below `part`.
        linear = {path.rpartition(".")[2] for path, one in modules.items() if isinstance(one, torch.nn.Linear)}
        names = linear if isinstance(lora.target_modules, str) else lora.target_modules
        lora_config.target_modules = rf"{re.escape(part)}\.(.*\.)?({'|'.join(map(re.escape, sorted(names)))})"
    # A model without its weights gets adapters without theirs: those of DeepSeek V3 take a minute to draw.
    adapted = get_peft_model(model, lora_config, low_cpu_mem_usage=next(model.parameters()).is_meta)
    if checkpointed:
        # A checkpointed block recomputes only where its input needs a gradient, and frozen embeddings give none
        # (transformers#42489). It also keeps LayerNorm's weight gradients right on Metal (pytorch#183825).
        adapted.enable_input_require_grads()
    layers = (path for path, module in adapted.named_modules() if hasattr(module, "lora_A"))
    adapted_names = sorted({path.rpartition(".")[2] for path in layers})
    trained, total = adapted.get_nb_trainable_parameters()
    shown = ", ".join(adapted_names[:SHOWN]) + (", …" if len(adapted_names) > SHOWN else "")
    which = "every linear layer but the output layer" if lora.target_modules == ALL_LINEAR else "the recipe's layers"
    parameters = f"{trained:,} of {total:,} parameters train ({trained / total:.2%})"
    dropout = f", dropout {lora.lora_dropout:g}" if lora.lora_dropout else ""
    reason = f"{parameters}, on {which}: {shown}; saved {lora.export}"
    return adapted, Choice(f"rank {lora.r}, alpha {lora.lora_alpha:g}{dropout}", reason)


def save(trainer: Any, folder: Path, lora: Lora) -> None:
    """Write the trained weights into `folder`: the adapter alone, or merged into the base model's weights.

    The trainer's model is unmerged afterwards, equal to rounding: it is still measured against its own start.
    """
    if lora.export == "adapter":
        trainer.save_model(str(folder))
        return
    adapted = trainer.model
    adapted.merge_adapter()
    try:
        base = adapted.get_base_model()
        stored = base.state_dict().items()
        merged = {plain: weight for name, weight in stored if (plain := plain_name(name)) is not None}
        base.save_pretrained(folder, state_dict=merged)
    finally:
        adapted.unmerge_adapter()
    trainer.processing_class.save_pretrained(folder)


def load_kept(trainer: Any, folder: Path) -> None:
    """Give a trainer's model the weights that a run kept in `folder`.

    Where these are merged, the model's adapters are new and add nothing.
    """
    if not hasattr(trainer.model, "peft_config") or (folder / "adapter_config.json").exists():
        # Trainer's own reader of a folder, which knows adapters, single files and shards.
        trainer._load_from_checkpoint(str(folder))
        return
    base = trainer.model.get_base_model()
    stored = type(base).from_pretrained(folder).state_dict()
    named = {name: stored[plain] for name in base.state_dict() if (plain := plain_name(name)) is not None}
    base.load_state_dict(named, strict=False)


def plain_name(name: str) -> str | None:
    """Return a weight's name in the model without adapters; None for an adapter's own and for what it replaces.

    `modules_to_save` are layers that were trained whole; peft keeps their first weights as `original_module`.
    """
    if ".lora_" in name or ".original_module." in name:
        return None
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name.replace(".base_layer.", "."))


def snippet(lora: Lora, auto_class: str, quantized: str | None = None) -> str | None:
    """Return lines that load an adapter with its base model, `quantized` as it was, and generate a text; None where
    the auto class itself reads the folder.
    """
    if lora.export == "merged":
        return None
    kind = auto_class.replace("Auto", "AutoPeft", 1)
    settings, more = "", ""
    if quantized is not None:
        how = "load_in_8bit=True" if quantized == "int8" else f'load_in_4bit=True, bnb_4bit_quant_type="{quantized}"'
        settings, more = f", quantization_config=BitsAndBytesConfig({how})", ", BitsAndBytesConfig"
    return (
        f"from peft import {kind}\nfrom transformers import AutoTokenizer{more}\n"
        f'model, tokenizer = {kind}.from_pretrained("."{settings}), AutoTokenizer.from_pretrained(".")\n'
        'print(tokenizer.decode(model.generate(**tokenizer("A text", return_tensors="pt"), max_new_tokens=32)[0]))'
    )
