"""Configurations of hub models in their real size, for machines that cannot reach the hub. Numbers, no weights."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.smoke import families

QWEN2 = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}
# What a model's own config.json says otherwise than the defaults of its family's class in transformers.
SIZES: dict[str, dict[str, Any]] = {
    "google-bert/bert-base-cased": {"vocab_size": 28996},
    "google-bert/bert-base-uncased": {},
    "distilbert/distilbert-base-uncased": {},
    "FacebookAI/roberta-base": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    "microsoft/mpnet-base": {"max_position_embeddings": 514},
    "sentence-transformers/all-MiniLM-L6-v2": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "intermediate_size": 1536,
    },
    "distilbert/distilgpt2": {"n_layer": 6},
    "openai-community/gpt2": {},
    "google-t5/t5-small": {},
    "facebook/bart-base": {
        "d_model": 768,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
    },
    "Helsinki-NLP/opus-mt-en-ro": {
        "vocab_size": 59543,
        "d_model": 512,
        "max_position_embeddings": 512,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2048),
        "pad_token_id": 59542,
    },
    "Qwen/Qwen2-0.5B-Instruct": QWEN2,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2,
    "Qwen/Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "facebook/wav2vec2-base": {},
    "google/vit-base-patch16-224-in21k": {},
    "meta-llama/Llama-2-7b-hf": {},
}


def config(recipe: Recipe) -> tuple[Any, Choice[str]]:
    """The configuration of the recipe's model in its real size, and where it comes from. Imports transformers.

    Raises UserError where the model cannot be had and nothing tells which architecture it is.
    """
    from transformers import AutoConfig

    said = recipe.model
    try:
        found = _started(checkpoint.resolve(said).config())
        return found, Choice(said, f"{type(found).__name__} of the model itself, without its weights")
    except UserError:
        if checkpoint.resolve(said).local:
            raise
    family = families.find(recipe)
    made = _started(AutoConfig.for_model(family.name, **SIZES.get(said, {})))
    size = "in this model's size" if said in SIZES else "in the size that transformers gives it by default"
    return made, Choice(said, f"the hub is out of reach: {type(made).__name__} {size}, without weights")


def _started(config: Any) -> Any:
    """The configuration with the token that answers begin with: T5's class leaves it to each model's file."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)
    return config
