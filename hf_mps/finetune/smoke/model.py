"""A tiny model of an architecture, with random weights, as a folder that `from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mps.errors import UserError
from hf_mps.finetune.smoke import words
from hf_mps.finetune.smoke.families import Family

IMAGE = 32
# Every size by the names that the architectures have for it. Lengths in positions stay: they cost little.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "num_key_value_heads": 1,
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 64),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("image_size", "num_conv_pos_embeddings"), IMAGE),
    "patch_size": 8,
    "num_conv_pos_embedding_groups": 2,
    "codevector_dim": 32,
    "proj_codevector_dim": 32,
    "embed_dim": 16,  # swin: it doubles in each stage
    "depths": [1, 1],
    "window_size": 2,
}
# As long as the layers were many, or a size that another one settles.
DERIVED = ("layer_types", "max_window_layers", "out_features", "out_indices", "stage_names")
SPECIAL = ("pad", "bos", "eos", "sep", "cls", "mask", "unk")
PARTS = ("bert", "electra")  # those whose tokenizer tells the model which of two texts a word is of
# Two more than there are: theirs begin behind the padding's number.
POSITIONS = {"roberta": 514, "xlm-roberta": 514}


def write(family: Family, folder: Path, texts: Sequence[str], seed: int) -> None:
    """Write model, configuration and tokenizer (or processor) of a tiny `family` into `folder`.

    `texts` are what the tokenizer learns its words from. Raises UserError for an architecture that the installed
    transformers does not have.
    """
    import torch
    from transformers import set_seed

    folder.mkdir(parents=True)
    said: dict[str, Any] = {}
    if family.reads == "image":
        _image_processor(folder)
    elif family.reads == "sound":
        said = words.letters(texts, folder)
    else:
        tokenizer = words.train(family.words, texts, parts=family.name in PARTS)
        tokenizer.save_pretrained(folder)
        said = _numbers(tokenizer)
    set_seed(seed)
    with torch.device("cpu"):
        model = _class(config := _config(family, said)).from_config(config)
    model.save_pretrained(folder)


def twin(model: Any) -> Any:
    """A tiny model of the class of `model`, on the CPU with random weights: for trials that need numbers."""
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    family = Family(inner.config.model_type, "text", "", inner.config.to_dict())
    with torch.device("cpu"):
        return type(inner)(_config(family, {}))


def _config(family: Family, said: dict[str, Any]) -> Any:
    """The configuration of a checkpoint, or the architecture's defaults, with every size made small."""
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.for_model(family.name).to_dict()
    except ValueError as error:
        raise UserError(f"--smoke: the installed transformers has no architecture '{family.name}'") from error
    own = {key: value for key, value in family.config.items() if key not in (*DERIVED, "architectures", "dtype")}
    small = {key: value for key, value in SMALL.items() if key in defaults and defaults[key] is not None}
    if isinstance(defaults.get("num_heads"), (list, tuple)):
        small["num_heads"] = [2] * len(SMALL["depths"])  # one for each stage
    if isinstance(defaults.get("conv_dim"), (list, tuple)):
        small["conv_dim"] = [32] * len(defaults["conv_dim"])
    if family.name in POSITIONS:
        small["max_position_embeddings"] = POSITIONS[family.name]
    numbers = {key: value for key, value in said.items() if key in defaults or key == "decoder_start_token_id"}
    own.pop("model_type", None)
    return AutoConfig.for_model(family.name, **own | small | numbers)


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


def _image_processor(folder: Path) -> None:
    """What the ViT checkpoints' own preprocessor_config.json says, at the tiny model's size."""
    says = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "size": {"height": IMAGE, "width": IMAGE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(says), encoding="utf-8")
