"""Which architecture a hub model is, and its real size, for machines that cannot reach the hub. No weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.schema import Recipe

QWEN2 = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}


def axes(*sections: int, theta: float = 1e6) -> dict[str, Any]:
    """`rope_parameters` of Qwen-VL's positions: how many numbers of half a head each of their three axes has."""
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sections)}


# The model_type of a model's own config.json, and what that says otherwise than the defaults of its class.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "google-bert/bert-base-cased": ("bert", {"vocab_size": 28996}),
    "google-bert/bert-base-uncased": ("bert", {}),
    "distilbert/distilbert-base-uncased": ("distilbert", {}),
    "FacebookAI/roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "microsoft/mpnet-base": ("mpnet", {"max_position_embeddings": 514}),
    "sentence-transformers/all-MiniLM-L6-v2": (
        "bert",
        {
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "intermediate_size": 1536,
        },
    ),
    "microsoft/MiniLM-L12-H384-uncased": (
        "bert",
        {
            "hidden_size": 384,
            "intermediate_size": 1536,
        },
    ),
    "distilbert/distilgpt2": ("gpt2", {"n_layer": 6}),
    "openai-community/gpt2": ("gpt2", {}),
    "google-t5/t5-small": ("t5", {}),
    "openai/whisper-small": (
        "whisper",
        {
            "d_model": 768,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 12),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
        },
    ),
    "facebook/bart-base": (
        "bart",
        {
            "d_model": 768,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
        },
    ),
    "Helsinki-NLP/opus-mt-en-ro": (
        "marian",
        {
            "vocab_size": 59543,
            "d_model": 512,
            "max_position_embeddings": 512,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2048),
            "pad_token_id": 59542,
        },
    ),
    "Qwen/Qwen2-0.5B-Instruct": ("qwen2", QWEN2),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", QWEN2),
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
    ),
    # The text model is that of config.json in huggingface.co/Mattimax/DATA-AI_Smol256M-Instruct, made from it;
    # the images' is SigLIP base patch-16/512 (huggingface.co/blog/smolervlm), 64 tokens for 512 x 512 pixels.
    "HuggingFaceTB/SmolVLM-256M-Instruct": (
        "idefics3",
        {
            "text_config": {
                "model_type": "llama",
                "hidden_size": 576,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "intermediate_size": 1536,
                "vocab_size": 49280,
                "max_position_embeddings": 8192,
                "pad_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "image_size": 512,
                "patch_size": 16,
            },
            "scale_factor": 4,
            "image_token_id": 49190,
        },
    ),
    # Qwen-VL: each model's own config.json; the language models are those of Qwen2-1.5B, Qwen2.5-3B and Qwen3-1.7B.
    "Qwen/Qwen2-VL-2B-Instruct": (
        "qwen2_vl",
        {
            "text_config": {
                "hidden_size": 1536,
                "num_hidden_layers": 28,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "intermediate_size": 8960,
                "vocab_size": 151_936,
                "max_position_embeddings": 32_768,
                "rope_parameters": axes(16, 24, 24),
            },
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "num_heads": 16,
                "mlp_ratio": 4,
                "patch_size": 14,
                "hidden_size": 1536,
            },
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": (
        "qwen2_5_vl",
        {
            "text_config": {
                "hidden_size": 2048,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "intermediate_size": 11_008,
                "vocab_size": 151_936,
                "max_position_embeddings": 128_000,
                "rope_parameters": axes(16, 24, 24),
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "patch_size": 14,
                "out_hidden_size": 2048,
            },
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen3-VL-2B-Instruct": (
        "qwen3_vl",
        {
            "text_config": {
                "hidden_size": 2048,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 6144,
                "vocab_size": 151_936,
                "max_position_embeddings": 262_144,
                "rope_parameters": axes(24, 20, 20, theta=5e6),
            },
            "vision_config": {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_heads": 16,
                "patch_size": 16,
                "out_hidden_size": 2048,
                "deepstack_visual_indexes": [5, 11, 17],
            },
            "tie_word_embeddings": True,
        },
    ),
    "llava-hf/llava-1.5-7b-hf": ("llava", {"text_config": {"model_type": "llama", "vocab_size": 32_064}}),
    "facebook/wav2vec2-base": ("wav2vec2", {}),
    "google/vit-base-patch16-224-in21k": ("vit", {}),
    # `yolos_ti` of transformers' convert_yolos_to_pytorch.py; 6.5 M parameters (README of github.com/hustvl/YOLOS).
    "hustvl/yolos-tiny": (
        "yolos",
        {
            "hidden_size": 192,
            "num_hidden_layers": 12,
            "num_attention_heads": 3,
            "intermediate_size": 768,
            "image_size": [800, 1333],
            "use_mid_position_embeddings": False,
        },
    ),
    "nvidia/mit-b0": ("segformer", {}),
    "meta-llama/Llama-2-7b-hf": ("llama", {}),
}


# Architectures whose classes have defaults that fit no model: an image's numbers are not as wide as a word's.
STAND_IN = {kind: name for name, (kind, _) in KNOWN.items() if kind.endswith("_vl")}

_OUT_OF_REACH: dict[str, str] = {}
"""What was said of models that the hub did not give: without a network it tries for 23 s, and a plan asks often."""


def model_type(recipe: Recipe, stored: Mapping[str, Any]) -> str | None:
    """The architecture that the recipe says, or the model's `stored` config.json, or KNOWN; None where nothing does."""
    return recipe.model_type or stored.get("model_type") or KNOWN.get(recipe.model, (None,))[0]


def config(recipe: Recipe) -> tuple[Any, Choice[str]]:
    """The configuration of the recipe's model in its real size, and where it comes from. Imports transformers.

    Raises UserError where the model cannot be had and nothing tells which architecture it is.
    """
    from transformers import AutoConfig

    named = recipe.model
    source = checkpoint.resolve(named)
    try:
        if named in _OUT_OF_REACH:
            raise UserError(_OUT_OF_REACH[named])
        loaded = _started(source.config())
        return loaded, Choice(named, f"{type(loaded).__name__} of the model itself, without its weights")
    except UserError as error:
        if source.local:
            raise
        _OUT_OF_REACH[named] = str(error)
        architecture = model_type(recipe, source.stored_config())
        if architecture is None:
            raise UserError(f"{error}, or its architecture with model_type=NAME") from error
    shape = named if KNOWN.get(named, (None,))[0] == architecture else STAND_IN.get(architecture)
    made = _started(AutoConfig.for_model(architecture, **(KNOWN[shape][1] if shape else {})))
    if shape is None:
        size = "in the size that transformers gives it by default"
    else:
        size = "in this model's size" if shape == named else f"in the size of {shape}"
    return made, Choice(named, f"the hub is out of reach: {type(made).__name__} {size}, without weights")


def _started(config: Any) -> Any:
    """The configuration with the token that answers begin with: T5's class leaves it to each model's file."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None)
    return config
