"""LoRA through peft: which layers carry an adapter, how many parameters train, what is left in the output folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hf_mps.core import extras
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.recipe import schema

ALL_LINEAR = "all-linear"
SHOWN = 8


class Lora(schema.Section):
    """peft's own names of LoraConfig, and `export`: what the output folder holds.

    `target_modules` is `all-linear` (each linear layer but the output layer, as QLoRA found it necessary to match full
    fine-tuning, arXiv 2305.14314, section 4) or a list of module names. `merged` writes a model that loads without
    peft, `adapter` the adapter alone.
    """

    r: int = Field(default=16, ge=1)
    lora_alpha: float = Field(default=32, gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    use_rslora: bool = False
    export: Literal["merged", "adapter"] = "merged"


def configuration(said: Lora, task_type: str) -> Any:
    """peft's LoraConfig for `task_type` (CAUSAL_LM, SEQ_2_SEQ_LM). Raises UserError where peft is not installed."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(
            f"lora: peft is not installed; next: {extras.install('lora')}, or lora=null to train every weight"
        ) from error
    return LoraConfig(
        r=said.r,
        # peft only divides by it, and annotates it as an integer.
        lora_alpha=said.lora_alpha,
        lora_dropout=said.lora_dropout,
        target_modules=said.target_modules,
        use_rslora=said.use_rslora,
        task_type=task_type,
    )


def apply(model: Any, said: Lora, task_type: str, *, checkpointed: bool = False) -> tuple[Any, Choice[str]]:
    """The model with adapters, its own weights frozen, and which layers carry them.

    `checkpointed` says that its blocks keep no activations and compute them again in the backward pass.

    Raises UserError where peft is not installed or the model has none of `target_modules`.
    """
    wanted = configuration(said, task_type)
    _refuse_unknown(model, said.target_modules)
    from peft import get_peft_model

    adapted = get_peft_model(model, wanted)
    if checkpointed:
        # A checkpointed block recomputes only where its input needs a gradient, and frozen embeddings give none
        # (transformers#42489); it is also what keeps LayerNorm's weight gradients right on Metal (pytorch#183825).
        adapted.enable_input_require_grads()
    return adapted, Choice(_words(said), _reason(adapted, said))


def save(trainer: Any, folder: Path, said: Lora) -> None:
    """Write the trained weights into `folder`: the adapter alone, or merged into the weights that it was trained over.

    The trainer's model is what it was afterwards, to rounding: it goes on being measured against its own start.
    """
    if said.export == "adapter":
        trainer.save_model(str(folder))
        return
    adapted = trainer.model
    adapted.merge_adapter()
    try:
        base = adapted.get_base_model()
        base.save_pretrained(folder, state_dict=dict(_merged(base)))
    finally:
        adapted.unmerge_adapter()
    trainer.processing_class.save_pretrained(folder)


def _merged(base: Any) -> Iterator[tuple[str, Any]]:
    """The weights of a model with merged adapters under the names that they have without."""
    for name, weight in base.state_dict().items():
        if ".base_layer." in name:
            yield name.replace(".base_layer.", "."), weight
        elif ".lora_" not in name:
            yield name, weight


def snippet(said: Lora, auto_class: str) -> str | None:
    """Three lines that load an adapter with its base model; None where the auto class itself reads the folder."""
    if said.export == "merged":
        return None
    kind = auto_class.replace("Auto", "AutoPeft", 1)
    return (
        f"from peft import {kind}\nfrom transformers import AutoTokenizer\n"
        f'model, tokenizer = {kind}.from_pretrained("."), AutoTokenizer.from_pretrained(".")'
    )


def _words(said: Lora) -> str:
    return f"rank {said.r}, alpha {said.lora_alpha:g}" + (
        f", dropout {said.lora_dropout:g}" if said.lora_dropout else ""
    )


def _reason(adapted: Any, said: Lora) -> str:
    modules = sorted(adapted.peft_config["default"].target_modules)
    trained, total = adapted.get_nb_trainable_parameters()
    shown = ", ".join(modules[:SHOWN]) + (", …" if len(modules) > SHOWN else "")
    which = "every linear layer but the output layer" if said.target_modules == ALL_LINEAR else "the recipe's layers"
    return (
        f"{trained:,} of {total:,} parameters train ({trained / total:.2%}), on {which}: {shown}; saved {said.export}"
    )


def _refuse_unknown(model: Any, targets: list[str] | str) -> None:
    """peft takes a list of which only one name fits; here each must, or nobody would know that it trains less."""
    if isinstance(targets, str):
        return
    there = {
        name.rpartition(".")[2] for name, module in model.named_modules() if getattr(module, "weight", None) is not None
    }
    paths = {name for name, _ in model.named_modules()}
    for name in targets:
        if name not in there and not any(path == name or path.endswith(f".{name}") for path in paths):
            allowed = ", ".join(sorted(part for part in there if not part.isdecimal()))
            raise UserError(
                f"lora.target_modules has '{name}', and {type(model).__name__} has no such layer; allowed:"
                f" {ALL_LINEAR}, {allowed}{nearest(name, there)}"
            )
