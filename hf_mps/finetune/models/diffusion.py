"""Latent diffusion through diffusers: what encodes pictures and captions, the UNet that trains, and what is saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_mps.core import extras
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.text import tokens

INDEX = "model_index.json"
"""The file that names a pipeline's class and its parts."""
PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
TOKENS = 77
"""CLIP's tokens of a caption; longer ones are cut."""
LATENTS, FACTOR = 4, 8
"""Channels of a latent, and pixels of an image's side for each of it."""


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
    return trainable(kind.from_pretrained(source, subfolder="unet", dtype=dtype, use_safetensors=True))


def trainable(model: Any) -> Any:
    """Return a UNet that recomputes its activations where Trainer asks for it by transformers' name."""
    model.gradient_checkpointing_enable = lambda **_: model.enable_gradient_checkpointing()
    return model


def captions(rows: Rows, prompt: str | None, batch: Mapping[str, list[Any]], indices: Sequence[int]) -> list[str]:
    """Return each row's caption, or `prompt` for all. Raises UserError for a row without text."""
    return tokens.texts(rows, "text", batch, indices) if prompt is None else [prompt] * len(indices)


def encoded(rows: Rows, pipeline: Any, size: int, prompt: str | None, device: str) -> Any:
    """Return rows of one column, `row`: tensors as safetensors, made once and then found again on the disk.

    `moments` is what the VAE says of the image, cut to `size` pixels (mean and logarithm of the variance, float32 of
    shape (2 x LATENTS, side, side)), `embeds` the caption's (TOKENS, width). SDXL's have `pooled` (width,) and
    `time_ids` (6,): height and width of the image before it was cut, upper and left edge, height and width now.
    """
    import torch
    from datasets import Features, Value
    from safetensors.torch import save

    from hf_mps.finetune.run.run_dir import digest_rows

    large = hasattr(pipeline, "text_encoder_2")
    images.refuse_missing(rows)
    pipeline.to(device)

    @torch.no_grad()
    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, list[bytes]]:
        found = []
        for at, caption in enumerate(captions(rows, prompt, batch, indices)):
            image = images.opened_value(rows, indices[at], batch["image"][at])
            pixels, corner = squared(image, size)
            made = {"moments": pipeline.vae.encode(pixels[None].to(device)).latent_dist.parameters[0]}
            one = pipeline.encode_prompt(
                caption, device=device, num_images_per_prompt=1, do_classifier_free_guidance=False
            )
            made["embeds"] = one[0][0]
            if large:
                made["pooled"] = one[2][0]
                made["time_ids"] = torch.tensor([*image.size[::-1], *corner, size, size], dtype=torch.float32)
            found.append(save({name: tensor.cpu().contiguous() for name, tensor in made.items()}))
        return {"row": found}

    # The files that rows name may hold other images than before, and the folder of the model other weights.
    content = f"{digest_rows({'': rows})['']['digest']} {_digest(pipeline)}"
    key = ("latents", size, prompt, device)
    kinds = Features({"row": Value("binary")})
    return tokens.map_cached(rows, encode, content=content, key=key, features=kinds, batch_size=16)


def squared(image: Any, size: int) -> tuple[Any, tuple[int, int]]:
    """Return the middle square of an image of `size` pixels, float32 (3, size, size) from -1 to 1, and its upper left
    corner (row, column) in the image whose shorter side has `size` pixels.

    As train_text_to_image_lora.py of diffusers cuts it with --center_crop.
    """
    import numpy
    import torch
    from PIL import Image

    short = min(image.size)
    scaled = image.resize([int(size * side / short) for side in image.size], Image.Resampling.LANCZOS)
    left, upper = (max(0, round((side - size) / 2)) for side in scaled.size)
    cut = numpy.asarray(scaled.crop((left, upper, left + size, upper + size)), dtype=numpy.float32)
    return torch.from_numpy(cut / 127.5 - 1).permute(2, 0, 1), (upper, left)


def _digest(pipeline: Any) -> str:
    """Return a digest of the weights that encode."""
    import torch

    found = hashlib.blake2b(digest_size=16)
    for name, part in sorted(pipeline.components.items()):
        if isinstance(part, torch.nn.Module):
            found.update(name.encode())
            for tensor in part.state_dict().values():
                found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class Latents:
    """A split for Trainer: rows of what `encoded` returns, and `number`, each one's place in the split."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from safetensors.torch import load

        return {**load(self._rows[index]["row"]), "number": index}


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
