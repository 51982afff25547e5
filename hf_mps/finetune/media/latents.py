"""Images and captions as a diffusion model reads them: encoded once, before it is loaded, and kept on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.models.diffusion import TOKENS
from hf_mps.finetune.text import tokens


def captions(rows: Rows, prompt: str | None, batch: Mapping[str, list[Any]], indices: Sequence[int]) -> list[str]:
    """Return each row's caption, or `prompt` for all. Raises UserError for a row without text."""
    return tokens.texts(rows, "text", batch, indices) if prompt is None else [prompt] * len(indices)


def encoded(rows: Rows, pipeline: Any, size: int, prompt: str | None, device: str) -> Any:
    """Return rows of one column, `row`: tensors as safetensors, made once and then found again on the disk.

    `moments` is what the VAE says of the image, cut to `size` pixels (mean and logarithm of the variance, float32 of
    shape (2 x channels, side, side)), `embeds` the caption's (tokens, width). SDXL's and SD3's have `pooled` (width,),
    SDXL's `time_ids` (6,) as well: height and width of the image before it was cut, upper and left edge, height and
    width now.
    """
    import torch
    from safetensors.torch import save

    from hf_mps.finetune.run.run_dir import digest_rows

    pooled, third = hasattr(pipeline, "text_encoder_2"), hasattr(pipeline, "text_encoder_3")
    how: dict[str, Any] = {"device": device, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    how |= {"prompt_2": None, "prompt_3": None, "max_sequence_length": TOKENS} if third else {}
    images.refuse_missing(rows)
    pipeline.to(device)

    @torch.no_grad()
    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, list[bytes]]:
        found = []
        for at, caption in enumerate(captions(rows, prompt, batch, indices)):
            image = images.opened_value(rows, indices[at], batch["image"][at])
            pixels, corner = squared(image, size)
            made = {"moments": pipeline.vae.encode(pixels[None].to(device)).latent_dist.parameters[0]}
            one = pipeline.encode_prompt(caption, **how)
            made["embeds"] = one[0][0]
            if pooled:
                made["pooled"] = one[2][0]
            if pooled and not third:
                made["time_ids"] = torch.tensor([*image.size[::-1], *corner, size, size], dtype=torch.float32)
            found.append(save({name: tensor.cpu().contiguous() for name, tensor in made.items()}))
        return {"row": found}

    # The files that rows name may hold other images than before, and the folder of the model other weights.
    content = f"{digest_rows({'': rows})['']['digest']} {_digest(pipeline)}"
    key = ("latents", size, prompt, device)
    return tokens.map_cached(rows, encode, content=content, key=key, features={"row": "binary"}, batch_size=16)


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
