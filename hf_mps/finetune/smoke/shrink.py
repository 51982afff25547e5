"""The configuration of a tiny model of any architecture: as many of its sizes made small as fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import summary
from hf_mps.finetune.models.known_configs import axes

IMAGE = 32
# Sizes by the names that the architectures have for them, in groups that are made small or left together: widths and
# heads of some have to fit each other in ways of their own (Mamba 2, XLNet). Lengths in positions stay.
DEPTHS: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("depths", "depth"), 1),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
}
HEADS: dict[str, Any] = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "num_key_value_heads": 1,
    **dict.fromkeys(("head_dim", "d_kv"), 16),
}
WIDTHS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 64),
    **dict.fromkeys(("hidden_sizes", "conv_dim", "codevector_dim", "proj_codevector_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("image_size", "num_conv_pos_embeddings"), IMAGE),
    "patch_size": 8,
    "num_conv_pos_embedding_groups": 2,
    "out_hidden_size": 32,
    "embed_dim": 8,  # swin: it doubles in each stage
    "window_size": 2,
}
# Keys whose length is the number of layers, or that follow from other sizes.
DERIVED = (
    *("layer_types", "max_window_layers", "out_features", "out_indices", "stage_names", "_out_features"),
    *("_out_indices", "mlp_layer_types", "layers_block_type", "attention_layers"),
)
# Pictures of several stages are halved at each: these leave something for the last one.
STAGES, STAGED = ("depths", "hidden_sizes"), {"image_size": 2 * IMAGE, "patch_size": 4}
# What two layers of an architecture need that says it layer by layer, and heads that have to make up the width; of
# those whose positions begin behind the padding's number, two more than there are. Qwen-VL's positions have three
# axes, which share a head of 16 numbers, and Qwen2.5-VL's windows are counted in pixels.
OWN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": {"rope_parameters": axes(2, 3, 3)}},
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": axes(2, 3, 3)},
        "vision_config": {"window_size": 32, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {"text_config": {"rope_parameters": axes(4, 2, 2)}, "vision_config": {"deepstack_visual_indexes": [0]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    **{name: {"max_position_embeddings": 514} for name in ("roberta", "xlm-roberta")},
}
# Parameters of a model that is still made with numbers: a gigabyte of weights, gradients and moments.
MOST = 60_000_000


def smallest(
    name: str, checkpoint_config: Mapping[str, Any], token_ids: Mapping[str, Any], make: Callable[[Any], Any]
) -> tuple[Any, str | None]:
    """Return the configuration of a tiny `name` and None, or the last one tried and why it does not work.

    `checkpoint_config` is a checkpoint's configuration (empty: the architecture's defaults), `token_ids` what the
    tokenizer determines; `make` builds a model from a configuration. The first configuration wins whose model can be
    built and takes one short input on the device meta. Raises UserError where the installed transformers lacks the
    architecture.
    """
    problem: str | None = "no combination of small sizes that was tried fits together"
    config = None
    for config in candidates(name, checkpoint_config, token_ids):
        problem = problem_with(config, make)
        if problem is None:
            break
    return config, problem


def candidates(name: str, checkpoint_config: Mapping[str, Any], token_ids: Mapping[str, Any]) -> Iterator[Any]:
    """Yield configurations of architecture `name`, smallest first, without those that its own class refuses."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        defaults = AutoConfig.for_model(name).to_dict()
    except ValueError as error:
        raise UserError(f"--smoke: the installed transformers has no architecture '{name}'") from error
    for sizes in (DEPTHS | HEADS | WIDTHS, DEPTHS | WIDTHS, DEPTHS):
        small = _with_own(_small(defaults, checkpoint_config, sizes), OWN.get(name, {}))
        known_ids = {
            key: value for key, value in token_ids.items() if key in defaults or key == "decoder_start_token_id"
        }
        try:
            yield AutoConfig.for_model(name, **_with_words(small, defaults, token_ids) | known_ids)
        except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError):
            continue


def problem_with(config: Any, make: Callable[[Any], Any]) -> str | None:
    """Return why no model can be made of `config`, or None; it is built on meta and given one short input.

    A forward pass that reads values fails on meta and says nothing about the configuration.
    """
    import torch

    from hf_mps.finetune.smoke.fake import FakeScalars, needs_numbers

    try:
        with torch.device("meta"):
            model = make(config).eval()
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > MOST:
            return f"with few layers it still has {count / 1e6:,.0f} M parameters"
        with torch.no_grad(), FakeScalars():
            model(**inputs(model))
    except Exception as error:
        if not needs_numbers(error):
            return summary(error)
    return None


def inputs(model: Any) -> dict[str, Any]:
    """Return one short row of what `model` reads, on the device meta."""
    import torch

    config, name = model.config, model.main_input_name
    with torch.device("meta"):
        if name == "pixel_values":
            main_input = torch.zeros(1, getattr(config, "num_channels", 3), *picture(config))
        elif name == "input_features" and hasattr(config, "max_source_positions"):  # Whisper takes no other length
            main_input = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
        elif name in ("input_values", "input_features"):
            width: Any = getattr(config, "num_mel_bins", None) or getattr(config, "feat_extract_input_dim", 80)
            main_input = torch.zeros(1, 4000) if name == "input_values" else torch.zeros(1, 64, width)
        else:
            main_input = torch.zeros(1, 8, dtype=torch.long)
        batch = {name: main_input}
        if config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.zeros(1, 8, dtype=torch.long)
    return batch


def picture(config: Any, default: int = IMAGE) -> tuple[int, int]:
    """Return the height and width in pixels that a configuration names, or `default` where it names none."""
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or default
    return (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[0]), int(size[1]))


def _small(
    defaults: Mapping[str, Any], checkpoint_config: Mapping[str, Any], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a configuration with `sizes` in place of its own, also in the configurations inside it."""
    small = {
        key: value
        for key, value in checkpoint_config.items()
        if key not in (*DERIVED, "architectures", "dtype", "model_type") and not _is_config(value)
    }
    for key, value in defaults.items():
        if _is_config(value):
            small[key] = {"model_type": value["model_type"], **_small(value, checkpoint_config.get(key) or {}, sizes)}
            small[key] = _without_none(small[key])
        elif key in sizes and value is not None:
            current = checkpoint_config.get(key, value)
            small[key] = [sizes[key]] * len(current) if isinstance(current, (list, tuple)) else sizes[key]
    if any(isinstance(defaults.get(key), (list, tuple)) for key in STAGES):
        small |= {key: size for key, size in STAGED.items() if isinstance(small.get(key), int) and key in sizes}
    return small


def _with_own(small: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with what its architecture needs, also in the configurations inside it."""
    return {**small, **{key: small[key] | one if _is_config(small.get(key)) else one for key, one in own.items()}}


def _with_words(small: Mapping[str, Any], defaults: Mapping[str, Any], token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the tokenizer's ids in the part of it that has a vocabulary (a text tower)."""
    known = {
        key: {name: one for name, one in token_ids.items() if name in defaults[key]}
        for key, value in small.items()
        if _is_config(value) and "vocab_size" in defaults.get(key, {})
    }
    return {key: {**value, **known[key]} if key in known else value for key, value in small.items()}


def _is_config(value: Any) -> bool:
    """Whether a value is the configuration of a part, such as the image or the text tower."""
    return isinstance(value, dict) and "model_type" in value


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
