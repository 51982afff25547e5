"""A tiny model of an architecture, with random weights, as a folder that `from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.smoke import processors, shrink

SPECIAL = ("pad", "bos", "eos", "sep", "cls", "mask", "unk")
# The image processor of each kind of input, as the architectures that are usual for it have it.
PICTURES = {
    "image": "ViTImageProcessor",
    "image and mask": "SegformerImageProcessor",
    "image and boxes": "YolosImageProcessor",
}
PARTS = ("bert", "electra")  # their tokenizers tell the model which of two texts a token belongs to


def write(family: processors.Family, folder: Path, texts: Sequence[str], seed: int) -> None:
    """Write a tiny `family` into `folder`: model, configuration and tokenizer (or processor).

    The tokenizer learns its words from `texts`. Raises UserError for an architecture that the installed transformers
    lacks, and where its configuration cannot be made tiny.
    """
    import torch
    from transformers import set_seed

    config, problem = shrink.smallest(family.name, family.config, processor(family, folder, texts, 2), _of_config)
    if problem is not None:
        raise UserError(f"--smoke: no tiny {family.name} can be made of its configuration: {problem}")
    if family.reads in PICTURES:
        image_processor(folder, shrink.picture(config), PICTURES[family.reads])
    if family.reads == "image and text":
        processors.seeing_images(folder, config)
    set_seed(seed)
    with torch.device("cpu"):
        model = _of_config(config)
    model.save_pretrained(folder)


def processor(family: processors.Family, folder: Path, texts: Sequence[str], seconds: int = 30) -> dict[str, Any]:
    """Write a tiny `family`'s tokenizer (or processor) into `folder`; return what the configuration says of it.

    A Whisper takes so many `seconds` of sound: one of two trains in a tenth of the time.
    """
    folder.mkdir(parents=True)
    if family.reads in PICTURES:
        image_processor(folder, (shrink.IMAGE, shrink.IMAGE), PICTURES[family.reads])
        return {}
    if family.reads == "image and text":
        return processors.seeing(family, folder, texts)
    if family.reads == "sound":
        whisper = family.name == "whisper"
        return processors.spoken(texts, folder, seconds) if whisper else processors.letters(texts, folder)
    tokenizer = processors.train(family.words, texts, parts=family.name in PARTS)
    tokenizer.save_pretrained(folder)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL}
    ids: dict[str, Any] = {key: value for key, value in special.items() if value is not None}
    ids["vocab_size"] = len(tokenizer)
    ids["decoder_start_token_id"] = ids.get("bos_token_id", ids.get("pad_token_id"))
    ids["forced_eos_token_id"] = ids.get("eos_token_id")
    # None replaces ids among the architecture's defaults that this vocabulary does not have.
    return ids | {key: None for key in ("bos_token_id", "pad_token_id") if key not in ids}


def tiny_copy(model: Any) -> Any:
    """Return a tiny model of the class of `model`, on the CPU with random weights, for trials that need values.

    None where its configuration cannot be made tiny.
    """
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, problem = shrink.smallest(inner.config.model_type, inner.config.to_dict(), {}, type(inner))
    if problem is not None:
        return None
    with torch.device("cpu"):
        return type(inner)(config)


def _of_config(config: Any) -> Any:
    """Return a model of the class that loads the architecture's hub checkpoints, with the head of their pretraining."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kinds = {
        "AutoModelForSpeechSeq2Seq": config.model_type in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": config.is_encoder_decoder
        and config.model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForCausalLM": config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": config.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return getattr(transformers, next((name for name, fits in kinds.items() if fits), "AutoModel")).from_config(config)


def image_processor(folder: Path, size: tuple[int, int], kind: str | None = None) -> None:
    """Write the preprocessor_config.json of an image processor, for images of `size` (height, width).

    `kind` is its class; None is that of the file which is there.
    """
    file = folder / "preprocessor_config.json"
    settings = {
        "image_processor_type": kind or json.loads(file.read_text(encoding="utf-8"))["image_processor_type"],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "size": dict(zip(("height", "width"), size, strict=True)),
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
