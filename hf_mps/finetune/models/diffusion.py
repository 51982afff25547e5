"""Latent diffusion through diffusers: a pipeline's parts loaded apart, what is saved of one, a tiny pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_mps.core import extras, notices
from hf_mps.core.errors import UserError

UNET, TRANSFORMER = "unet", "transformer"
PIPELINES = {
    "StableDiffusionPipeline": UNET,
    "StableDiffusionXLPipeline": UNET,
    "StableDiffusion3Pipeline": TRANSFORMER,
}
"""The part of each pipeline that predicts the noise, which trains."""
CLASSES = {UNET: "UNet2DConditionModel", TRANSFORMER: "SD3Transformer2DModel"}
_OF_IMAGES, _OF_TEXTS = ("to_k", "to_q", "to_v", "to_out.0"), ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
LAYERS = {UNET: [*_OF_IMAGES], TRANSFORMER: [f"attn.{name}" for name in (*_OF_IMAGES, *_OF_TEXTS)]}
"""The layers that get adapters, as diffusers' scripts choose them."""
TOKENS = 77
"""The tokens of a caption that CLIP and, as diffusers' script for SD3 has it, T5 read; longer ones are cut."""
OF_THE_HUB = "The `local_dir_use_symlinks` argument"
"""What huggingface_hub 2 warns of whenever diffusers 0.42 loads a configuration (configuration_utils.py)."""


def library() -> Any:
    """Return the module diffusers, without its bars. Raises UserError where it is not installed."""
    try:
        import diffusers
    except ImportError as error:
        raise UserError(f"diffusers is not installed; next: {extras.install('diffusion')}") from error
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    return diffusers


def encoders(source: str, dtype: Any) -> Any:
    """Load a pipeline without the part that trains: text encoders in `dtype`, the VAE in float32, as diffusers has it.

    Raises UserError for another kind of pipeline.
    """
    import torch

    with notices.ignoring(UserWarning, OF_THE_HUB):
        index, part = _index(source)
        # The filter blackens pictures, a run's among them; a pipeline that loads the adapters has its own.
        left_out = dict.fromkeys({part, "safety_checker", "image_encoder"} & index.keys())
        kinds = {"vae": torch.float32, "default": dtype}
        kind = getattr(library(), index["_class_name"])
        pipeline = kind.from_pretrained(source, dtype=kinds, use_safetensors=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def denoiser(source: str, dtype: Any) -> Any:
    """Load a pipeline's UNet or transformer in `dtype`. Raises UserError for another kind of pipeline."""
    with notices.ignoring(UserWarning, OF_THE_HUB):
        part = _index(source)[1]
        kind = getattr(library(), CLASSES[part])
        return trainable(kind.from_pretrained(source, subfolder=part, dtype=dtype, use_safetensors=True))


def stored_size(source: str) -> dict[str, Any]:
    """Return the configuration of a pipeline's denoiser. Raises UserError for another kind of pipeline."""
    with notices.ignoring(UserWarning, OF_THE_HUB):
        part = _index(source)[1]
        size: dict[str, Any] = getattr(library(), CLASSES[part]).load_config(source, subfolder=part)
    return size


def _index(source: str) -> tuple[dict[str, Any], str]:
    """Return a pipeline's index, and the part of it that trains."""
    index = library().DiffusionPipeline.load_config(source)
    kind = index["_class_name"]
    if kind not in PIPELINES:
        raise UserError(f"model {source}: it is a {kind}; allowed: {', '.join(PIPELINES)}")
    return index, PIPELINES[kind]


def part_of(size: Mapping[str, Any]) -> str:
    """Return which part of a pipeline a configuration is of."""
    return TRANSFORMER if "joint_attention_dim" in size else UNET


def trainable(model: Any) -> Any:
    """Return a denoiser that recomputes its activations where Trainer asks for it by transformers' name."""
    model.gradient_checkpointing_enable = lambda **_: model.enable_gradient_checkpointing()
    return model


def save(trainer: Any, folder: Path, kind: Any) -> None:
    """Write a trainer's adapters into `folder`, for peft, and for `load_lora_weights` of pipelines of the class `kind`.

    The second file holds the same numbers under diffusers' names, with peft's settings beside them.
    """
    from peft import get_peft_model_state_dict

    trainer.save_model(str(folder))
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = {name.removeprefix("base_model.model."): one for name, one in get_peft_model_state_dict(model).items()}
    settings = model.peft_config["default"].to_dict()
    part = PIPELINES[kind.__name__]
    kind.save_lora_weights(folder, **{f"{part}_lora_layers": layers, f"{part}_lora_adapter_metadata": settings})


def write_tiny(size: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Write a tiny pipeline into `folder` whose parts fit a denoiser of the configuration `size`.

    Its tokenizers know letters alone.
    """
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, set_seed
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    diffusers, part = library(), part_of(size)
    letters, ends = list(bytes_to_unicode().values()), ["<|startoftext|>", "<|endoftext|>"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    tokenizer = CLIPTokenizer(vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=TOKENS)
    set_seed(seed)

    def reader(width: int, kind: Any = CLIPTextModelWithProjection, hidden: int | None = None) -> Any:
        wide = hidden or width
        sizes = {"hidden_size": wide, "projection_dim": width, "intermediate_size": 32, "num_hidden_layers": 2}
        ids = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
        return kind(CLIPTextConfig(vocab_size=len(words), num_attention_heads=4, **sizes, **ids))

    with torch.device("cpu"):
        parts = {
            "vae": diffusers.AutoencoderKL(
                block_out_channels=[4] * 4,
                down_block_types=["DownEncoderBlock2D"] * 4,
                up_block_types=["UpDecoderBlock2D"] * 4,
                latent_channels=size.get("in_channels", 4),
                shift_factor=0.0609 if part == TRANSFORMER else None,
                norm_num_groups=2,
            ),
            part: getattr(diffusers, CLASSES[part])(**{**size, **_small(size)}),
            "tokenizer": tokenizer,
        }
        if part == TRANSFORMER:
            half = size["pooled_projection_dim"] // 2
            parts |= {f"text_encoder{number}": reader(half, hidden=32) for number in ("", "_2")}
            parts |= {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), "tokenizer_2": tokenizer}
            pipeline = diffusers.StableDiffusion3Pipeline(**parts, **_tiny_t5(size["joint_attention_dim"]))
        else:
            wide = size["cross_attention_dim"]
            parts["scheduler"] = diffusers.DDIMScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
            )
            if size.get("addition_embed_type") == "text_time":
                pooled = size["projection_class_embeddings_input_dim"] - 6 * size["addition_time_embed_dim"]
                second = {"text_encoder_2": reader(pooled), "tokenizer_2": tokenizer}
                parts |= {"text_encoder": reader(wide - pooled, CLIPTextModel), **second}
                pipeline = diffusers.StableDiffusionXLPipeline(**parts)
            else:
                rest = dict.fromkeys(("safety_checker", "feature_extractor"))
                parts |= {"text_encoder": reader(wide, CLIPTextModel), **rest}
                pipeline = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder)


def _tiny_t5(width: int) -> dict[str, Any]:
    """Return a T5 of one layer whose hidden states have `width` numbers, and a tokenizer of printable letters."""
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *(chr(code) for code in range(33, 127))]
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    tokenizer = T5TokenizerFast(vocab=[(piece, 0.0) for piece in pieces], extra_ids=0)
    return {"text_encoder_3": T5EncoderModel(T5Config(vocab_size=len(pieces), **sizes)), "tokenizer_3": tokenizer}


def _small(size: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a tiny denoiser: a UNet of as many stages, each narrow, with one layer, or two blocks."""
    if part_of(size) == TRANSFORMER:
        heads = {"num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
        return {"num_layers": 2, "sample_size": 16, "pos_embed_max_size": 64} | heads
    stages = len(size["block_out_channels"])
    small = {"block_out_channels": [8] * stages, "attention_head_dim": 2, "layers_per_block": 1, "norm_num_groups": 4}
    return small | {"transformer_layers_per_block": 1, "sample_size": 16}
