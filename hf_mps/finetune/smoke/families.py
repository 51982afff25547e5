"""Which architecture a recipe's model is, and what words its tokenizer has, known without its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.known_configs import model_type
from hf_mps.finetune.recipe.schema import Recipe

Input = Literal["text", "image", "sound", "image and text", "image and mask", "image and boxes"]
Words = Literal["wordpiece", "sentence", "bytes", "chat", "pieces", ""]

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
# The usual architecture of a task's models, and what they read.
USUAL: tuple[str, Input] = ("bert", "text")
TASKS: dict[str, tuple[str, Input]] = {
    "image-classification": ("vit", "image"),
    "image-segmentation": ("segformer", "image and mask"),
    "image-text": ("idefics3", "image and text"),
    "object-detection": ("yolos", "image and boxes"),
    "speech-recognition": ("wav2vec2", "sound"),
    "speech-seq2seq": ("whisper", "sound"),
    "causal-lm": ("gpt2", "text"),
    **dict.fromkeys(("sft", "dpo", "grpo"), ("qwen2", "text")),
    **dict.fromkeys(("summarization", "translation"), ("t5", "text")),
}
# The words of an architecture that is not listed above: gaps are for tokenizers that have a word for them.
UNLISTED: dict[str, Words] = {"masked-lm": "wordpiece"}


@dataclass(frozen=True)
class Family:
    """An architecture by transformers' `model_type`, what its model reads, and how its tokenizer makes words.

    `config` is the configuration of a checkpoint that is here, empty where the architecture's defaults have to do.
    `reason` says why it is this one where the model's own architecture is not known.
    """

    name: str
    reads: Input
    words: Words
    config: dict[str, Any]
    reason: str = ""


def find(recipe: Recipe) -> Family:
    """The family of the recipe's model, or where nothing here tells its architecture, one that is usual for the task.

    Raises UserError for a folder or a package without a checkpoint.
    """
    usual, reads = TASKS.get(recipe.task, USUAL)
    config = checkpoint.resolve(recipe.model).stored_config()
    known = model_type(recipe, config)
    reason = (
        ""
        if known
        else f"nothing here tells the architecture of {recipe.model} (model_type=NAME does): {usual} is usual for"
        f" {recipe.task}"
    )
    name = known or usual
    words: Words = WORDS.get(name, UNLISTED.get(recipe.task, "bytes")) if reads == "text" else ""
    return Family(name, reads, words, config if config.get("model_type") == name else {}, reason)
