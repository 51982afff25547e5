"""A tiny model of an architecture, with random weights, as a folder that `from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.smoke import shrink, tokenizers
from hf_mps.finetune.smoke.families import Family

SPECIAL = ("pad", "bos", "eos", "sep", "cls", "mask", "unk")
PARTS = ("bert", "electra")  # those whose tokenizer tells the model which of two texts a word is of


def write(family: Family, folder: Path, texts: Sequence[str], seed: int) -> None:
    """Write model, configuration and tokenizer (or processor) of a tiny `family` into `folder`.

    `texts` are what the tokenizer learns its words from. Raises UserError for an architecture that the installed
    transformers does not have, and where no tiny model of it can be made.
    """
    import torch
    from transformers import set_seed

    said = processor(family, folder, texts)
    config, why = shrink.smallest(family.name, family.config, said, lambda config: _class(config).from_config(config))
    if why is not None:
        raise UserError(f"--smoke: no tiny {family.name} can be made of its configuration: {why}")
    if family.reads == "image":
        image_processor(folder, shrink.picture(config))
    set_seed(seed)
    with torch.device("cpu"):
        model = _class(config).from_config(config)
    model.save_pretrained(folder)


def processor(family: Family, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Write the tokenizer (or processor) of a tiny `family` into `folder`; what its configuration says of that."""
    folder.mkdir(parents=True)
    if family.reads == "image":
        image_processor(folder, (shrink.IMAGE, shrink.IMAGE))
        return {}
    if family.reads == "sound":
        return tokenizers.letters(texts, folder)
    tokenizer = tokenizers.train(family.words, texts, parts=family.name in PARTS)
    tokenizer.save_pretrained(folder)
    return _numbers(tokenizer)


def tiny_copy(model: Any) -> Any:
    """A tiny model of the class of `model`, on the CPU with random weights: for trials that need numbers.

    None where its configuration cannot be made small.
    """
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, why = shrink.smallest(inner.config.model_type, inner.config.to_dict(), {}, type(inner))
    if why is not None:
        return None
    with torch.device("cpu"):
        return type(inner)(config)


def _numbers(tokenizer: Any) -> dict[str, Any]:
    """What a configuration says of the tokenizer: the vocabulary's size and the special words' numbers."""
    found = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL}
    numbers: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    numbers["vocab_size"] = len(tokenizer)
    numbers["decoder_start_token_id"] = numbers.get("bos_token_id", numbers.get("pad_token_id"))
    numbers["forced_eos_token_id"] = numbers.get("eos_token_id")
    # Special words of the architecture's defaults that this vocabulary does not have.
    return numbers | {key: None for key in ("bos_token_id", "pad_token_id") if key not in numbers}


def _class(config: Any) -> Any:
    """The class whose weights a hub checkpoint of this architecture holds: with the head that it was trained with."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    if config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return transformers.AutoModelForMaskedLM
    if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def image_processor(folder: Path, size: tuple[int, int]) -> None:
    """Write what the ViT checkpoints' own preprocessor_config.json says, for pictures of `size` (height, width)."""
    says = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "size": dict(zip(("height", "width"), size, strict=True)),
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(says), encoding="utf-8")
