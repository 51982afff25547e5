"""Latent diffusion through diffusers: a pipeline's parts loaded apart, what is saved of the UNet, a tiny pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_mps.core import extras, notices
from hf_mps.core.errors import UserError

PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
TOKENS = 77
"""CLIP's tokens of a caption; longer ones are cut."""
OF_THE_HUB = "The `local_dir_use_symlinks` argument"
"""What huggingface_hub 2 warns of whenever diffusers 0.42 loads a configuration (configuration_utils.py)."""
LATENTS = 4
"""Channels of a latent."""


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
    """Load a pipeline without its UNet: text encoders in `dtype`, the VAE in float32, as diffusers' scripts have it.

    Raises UserError for another kind of pipeline.
    """
    import torch

    diffusers = library()
    with notices.ignoring(UserWarning, OF_THE_HUB):
        index = diffusers.DiffusionPipeline.load_config(source)
        kind = index["_class_name"]
        if kind not in PIPELINES:
            raise UserError(f"model {source}: it is a {kind}; allowed: {', '.join(PIPELINES)}")
        # The filter blackens pictures, a run's among them; a pipeline that loads the adapters has its own.
        left_out = dict.fromkeys({"unet", "safety_checker", "image_encoder"} & index.keys())
        kinds = {"vae": torch.float32, "default": dtype}
        pipeline = getattr(diffusers, kind).from_pretrained(source, dtype=kinds, use_safetensors=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def unet(source: str, dtype: Any) -> Any:
    """Load a pipeline's UNet in `dtype`."""
    kind = library().UNet2DConditionModel
    with notices.ignoring(UserWarning, OF_THE_HUB):
        return trainable(kind.from_pretrained(source, subfolder="unet", dtype=dtype, use_safetensors=True))


def trainable(model: Any) -> Any:
    """Return a UNet that recomputes its activations where Trainer asks for it by transformers' name."""
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
    kind.save_lora_weights(folder, unet_lora_layers=layers, unet_lora_adapter_metadata=settings)


def write_tiny(size: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Write a tiny pipeline into `folder` whose parts fit a UNet of the configuration `size`.

    Its tokenizer knows letters alone.
    """
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, set_seed
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    diffusers = library()
    letters, ends = list(bytes_to_unicode().values()), ["<|startoftext|>", "<|endoftext|>"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    tokenizer = CLIPTokenizer(vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=TOKENS)
    large = size.get("addition_embed_type") == "text_time"
    wide = size["cross_attention_dim"]
    set_seed(seed)

    def reader(width: int, kind: Any = CLIPTextModel) -> Any:
        sizes = {"hidden_size": width, "projection_dim": width, "intermediate_size": 32, "num_hidden_layers": 2}
        ids = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
        return kind(CLIPTextConfig(vocab_size=len(words), num_attention_heads=4, **sizes, **ids))

    with torch.device("cpu"):
        parts = {
            "vae": diffusers.AutoencoderKL(
                block_out_channels=[4] * 4,
                down_block_types=["DownEncoderBlock2D"] * 4,
                up_block_types=["UpDecoderBlock2D"] * 4,
                latent_channels=LATENTS,
                norm_num_groups=2,
            ),
            "unet": diffusers.UNet2DConditionModel(**{**size, **_small(size)}),
            "scheduler": diffusers.DDIMScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
            ),
            "tokenizer": tokenizer,
        }
        if large:
            pooled = size["projection_class_embeddings_input_dim"] - 6 * size["addition_time_embed_dim"]
            second = {"text_encoder_2": reader(pooled, CLIPTextModelWithProjection), "tokenizer_2": tokenizer}
            parts |= {"text_encoder": reader(wide - pooled), **second}
            pipeline = diffusers.StableDiffusionXLPipeline(**parts)
        else:
            rest = dict.fromkeys(("safety_checker", "feature_extractor"))
            parts |= {"text_encoder": reader(wide), **rest}
            pipeline = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder)


def _small(size: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a tiny UNet: as many stages, each narrow, with one layer."""
    stages = len(size["block_out_channels"])
    small = {"block_out_channels": [8] * stages, "attention_head_dim": 2, "layers_per_block": 1, "norm_num_groups": 4}
    return small | {"transformer_layers_per_block": 1, "sample_size": 16}
