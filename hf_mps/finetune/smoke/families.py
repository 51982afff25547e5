"""Which architecture a recipe's model is, and what words its tokenizer has, known without its files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.schema import Recipe

Input = Literal["text", "image", "sound"]
Words = Literal["wordpiece", "sentence", "bytes", "chat", "pieces", ""]

# The last part of a hub id to the model_type of its config.json; the first that is found, so a special name is first.
NAMES: tuple[tuple[str, str], ...] = (
    (r"xlm-roberta", "xlm-roberta"),
    (r"distilroberta|roberta", "roberta"),
    (r"distilbert", "distilbert"),
    (r"modernbert", "modernbert"),
    (r"deberta-v[23]", "deberta-v2"),
    (r"albert", "albert"),
    (r"electra", "electra"),
    (r"mpnet", "mpnet"),
    (r"bert|minilm|bge-(small|base|large)-en|gte-(small|base|large)|e5-(small|base|large)", "bert"),
    (r"qwen3", "qwen3"),
    (r"qwen(1\.5|2)", "qwen2"),
    (r"smollm3", "smollm3"),
    (r"llama|smollm", "llama"),
    (r"mistral", "mistral"),
    (r"gemma-3", "gemma3_text"),
    (r"gemma-2", "gemma2"),
    (r"gpt2", "gpt2"),
    (r"pythia", "gpt_neox"),
    (r"^opt-\d", "opt"),
    (r"mt5", "mt5"),
    (r"t5", "t5"),
    (r"mbart", "mbart"),
    (r"bart", "bart"),
    (r"pegasus", "pegasus"),
    (r"opus-mt", "marian"),
    (r"wav2vec2|xls-r", "wav2vec2"),
    (r"hubert", "hubert"),
    (r"wavlm", "wavlm"),
    (r"deit", "deit"),
    (r"(^|-)vit-", "vit"),
    (r"swin", "swin"),
    (r"dinov2", "dinov2"),
)

# How the tokenizer of each architecture makes words: what is not listed has none, or is text in bytes.
WORDS: dict[str, Words] = {
    **dict.fromkeys(("bert", "distilbert", "electra", "modernbert"), "wordpiece"),
    **dict.fromkeys(("roberta", "bart", "mpnet"), "sentence"),
    **dict.fromkeys(("gpt2", "gpt_neox", "opt"), "bytes"),
    **dict.fromkeys(("qwen2", "qwen3", "llama", "smollm3", "mistral", "gemma2", "gemma3_text"), "chat"),
    **dict.fromkeys(
        ("t5", "mt5", "marian", "pegasus", "mbart", "xlm-roberta", "albert", "deberta-v2"),
        "pieces",
    ),
}
# What the models of a task read, where it is no text, and the words of an architecture that is not listed above: gaps
# are for tokenizers that have a word for them.
READS: dict[str, Input] = {"image-classification": "image", "speech-recognition": "sound"}
UNLISTED: dict[str, Words] = {"masked-lm": "wordpiece"}


@dataclass(frozen=True)
class Family:
    """An architecture by transformers' `model_type`, what its model reads, and how its tokenizer makes words.

    `config` is the configuration of a checkpoint that is here, empty where the architecture's defaults have to do.
    """

    name: str
    reads: Input
    words: Words
    config: dict[str, Any]


def find(recipe: Recipe) -> Family:
    """The family of the recipe's model: what it says itself, its folder's config.json, or the rule for its name.

    Raises UserError where none of them tells.
    """
    config: dict[str, Any] = {}
    source = checkpoint.resolve(recipe.model)
    if source.local:
        config = json.loads((Path(source.place) / "config.json").read_text(encoding="utf-8"))
    name = recipe.model_type or config.get("model_type") or of(recipe.model)
    if name is None:
        way_on = "model_type=NAME, as its config.json has it"
        raise UserError(f"--smoke: no rule tells the architecture of {recipe.model}; next: {way_on}")
    reads = READS.get(recipe.task, "text")
    words: Words = WORDS.get(name, UNLISTED.get(recipe.task, "bytes")) if reads == "text" else ""
    return Family(name, reads, words, config if config.get("model_type") == name else {})


def of(model: str) -> str | None:
    """The model_type that the name of a hub id tells, or None."""
    last = model.lower().rpartition("/")[2]
    return next((name for pattern, name in NAMES if re.search(pattern, last)), None)
