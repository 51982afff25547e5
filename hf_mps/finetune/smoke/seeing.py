"""The processor of a tiny model of images and text: its tokenizer, its words for images, and how it reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.smoke import shrink, tokenizers
from hf_mps.finetune.smoke.families import Family

Files = tuple[dict[str, Any], dict[str, Any]]
"""What stands in preprocessor_config.json and in processor_config.json."""

TURNS = "{% for message in messages %}"
PARTS = "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else 'IMAGE' }}{% endfor %}"
# SmolVLM's format of conversations: the role, the parts of its message, and a token that ends it.
SMOL = (
    f"<|im_start|>{TURNS}" + "{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    + PARTS.replace("IMAGE", "<image>")
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
QWEN = (
    TURNS
    + "<|im_start|>{{ message['role'] }}\n"
    + PARTS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (
    TURNS
    + "{{ message['role'] | upper }}: "
    + PARTS.replace("IMAGE", "<image>\n")
    + "{{ eos_token if message['role'] == 'assistant' else ' ' }}{% endfor %}"
    + "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Squares along an image's longer side, as SmolVLM-256M's checkpoint has it.
ACROSS = 4
# Pixels of an image's area at least and at most, as the checkpoints of Qwen2-VL, Qwen2.5-VL and Qwen3-VL have it.
AREA = {"shortest_edge": 3136, "longest_edge": 12_845_056}
QWEN3_AREA = {"shortest_edge": 65_536, "longest_edge": 16_777_216}


def _in_squares(config: Any) -> Files:
    """Idefics3's and SmolVLM's: a small whole image and squares of it, of the size that the image tower takes."""
    side = shrink.picture(config)[0]
    patches = side // int(config.vision_config.patch_size)
    reads = {
        "size": {"longest_edge": ACROSS * side},
        "max_image_size": {"longest_edge": side},
        "do_image_splitting": True,
    }
    return reads, {"image_seq_len": (patches // int(config.scale_factor)) ** 2}


def _in_patches(area: dict[str, int], config: Any) -> Files:
    """Qwen-VL's: as many patches as an image has, which is made to have so many pixels."""
    vision = config.vision_config
    reads = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "size": area,
    }
    return reads, {}


def _whole(config: Any) -> Files:
    """LLaVA 1.5's: the middle of an image, in the size that its tower takes, which adds a token of its own."""
    side = shrink.picture(config)[0]
    reads = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "do_center_crop": True}
    says = {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": 1,
    }
    return reads, says


@dataclass(frozen=True)
class Kind:
    """How an architecture's processor is made; `marks` are its special tokens by the configuration's keys of them."""

    processor: str
    image_processor: str
    template: str
    files: Callable[[Any], Files]
    marks: Mapping[str, str]
    end: str = "<|im_end|>"
    others: Sequence[str] = ()


# Idefics3's processor writes the place of each square that an image is read in, up to 6 x 6.
SQUARES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
VISION = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
KINDS = {
    "idefics3": Kind(
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        SMOL,
        _in_squares,
        {"image_token_id": "<image>"},
        end="<end_of_utterance>",
        others=("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *SQUARES),
    ),
    "qwen2_vl": Kind("Qwen2VLProcessor", "Qwen2VLImageProcessor", QWEN, partial(_in_patches, AREA), VISION),
    "qwen2_5_vl": Kind("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", QWEN, partial(_in_patches, AREA), VISION),
    "qwen3_vl": Kind("Qwen3VLProcessor", "Qwen2VLImageProcessor", QWEN, partial(_in_patches, QWEN3_AREA), VISION),
    "llava": Kind("LlavaProcessor", "CLIPImageProcessor", LLAVA, _whole, {"image_token_index": "<image>"}),
}
"""Architecture -> how its processor is made: those that the task's recipes name."""


def processor(family: Family, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Write the processor into `folder`, without its image processor's sizes; return what the configuration says of it.

    Raises UserError for an architecture of another kind.
    """
    if family.name not in KINDS:
        raise UserError(
            f"--smoke: no tiny {family.name} of images and text can be made; allowed: {', '.join(KINDS)}; next:"
            " model_type=NAME of one of them for a try of the recipe"
        )
    kind = KINDS[family.name]
    tokenizer = tokenizers.train("chat", texts, parts=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [*kind.marks.values(), *kind.others]})
    tokenizer.eos_token = kind.end
    tokenizer.chat_template = kind.template
    tokenizer.save_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    marks = {key: tokenizer.convert_tokens_to_ids(mark) for key, mark in kind.marks.items()}
    return {**ids, **marks, "vocab_size": len(tokenizer)}


def image_processor(folder: Path, config: Any) -> None:
    """Write how a model of `config` reads images."""
    kind = KINDS[config.model_type]
    reads, says = kind.files(config)
    whole = {
        "preprocessor_config.json": {"image_processor_type": kind.image_processor, **reads},
        "processor_config.json": says,
    }
    for name, values in whole.items():
        text = json.dumps({**values, "processor_class": kind.processor})
        (folder / name).write_text(text, encoding="utf-8")
