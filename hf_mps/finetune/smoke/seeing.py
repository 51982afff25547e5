"""The processor of a tiny model of images and text: Idefics3's, which SmolVLM has too, with a tokenizer of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.smoke import shrink, tokenizers
from hf_mps.finetune.smoke.families import Family

KIND = "idefics3"
PLACE, FAKE, END = "<image>", "<fake_token_around_image>", "<end_of_utterance>"
# Idefics3's processor writes the place of each square that an image is read in, up to 6 x 6.
SQUARES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = [PLACE, FAKE, END, "<global-img>", *SQUARES]
# SmolVLM's format of conversations: the role, the parts of its message, and a token that ends it.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Squares along an image's longer side, as SmolVLM-256M's checkpoint has it.
ACROSS = 4


def processor(family: Family, folder: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Write the processor into `folder`, without its image processor's sizes; return what the configuration says of it.

    Raises UserError for an architecture of another kind.
    """
    if family.name != KIND:
        raise UserError(
            f"--smoke: no tiny {family.name} of images and text can be made; next: model_type={KIND} for a try of the"
            " recipe with that architecture"
        )
    tokenizer = tokenizers.train("chat", texts, parts=False)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.eos_token = END
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return {**ids, "vocab_size": len(tokenizer), "image_token_id": tokenizer.convert_tokens_to_ids(PLACE)}


def image_processor(folder: Path, config: Any) -> None:
    """Write how a model of `config` reads images: in squares of the size that its image tower takes."""
    side = shrink.picture(config)[0]
    patches = side // int(config.vision_config.patch_size)
    reads = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "size": {"longest_edge": ACROSS * side},
        "max_image_size": {"longest_edge": side},
        "do_image_splitting": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(reads), encoding="utf-8")
    says = {"processor_class": "Idefics3Processor", "image_seq_len": (patches // int(config.scale_factor)) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(says), encoding="utf-8")
