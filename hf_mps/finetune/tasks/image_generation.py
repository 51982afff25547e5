"""Image generation: a diffusion model learns from images with captions, or one subject by a prompt (DreamBooth)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data import synthetic
from hf_mps.finetune.data.load import Rows
from hf_mps.finetune.media import images
from hf_mps.finetune.models import checkpoint, diffusion, lora
from hf_mps.finetune.models.checkpoint import resolve
from hf_mps.finetune.models.diffusion import TOKENS
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report import pictures
from hf_mps.finetune.tasks import Picture, Prepared, Task, _language, snippets
from hf_mps.finetune.text import tokens

# Sides of the images of a smoke run, in pixels, and the most rows of a split.
SMOKE_SIZE, MADE_UP = (160, 128), 8


class Columns(schema.Columns):
    """The columns of the data by their roles; `image` holds paths, or images as Parquet and the hub have them."""

    image: str = "image"
    """The column of the image: a path, or bytes."""
    text: str | None = None
    """The column of the caption."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class Lora(lora.Lora):
    """Keys of peft's LoraConfig under their own names, with the values of diffusers' scripts; a pipeline loads the
    adapter.
    """

    r: int = Field(default=4, ge=1)
    """The rank of the adapters."""
    lora_alpha: float = Field(default=4, gt=0)
    """The adapters are scaled by lora_alpha / r."""
    every: ClassVar[tuple[str, ...]] = ()  # peft finds all linear layers of transformers' models alone
    target_modules: list[str] | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    """The layers that get adapters; by default all of attention, as diffusers' scripts choose them."""
    init_lora_weights: Literal["gaussian"] | bool = "gaussian"
    """How adapters begin: gaussian as in diffusers' scripts, true as peft has it."""
    export: Literal["adapter"] = "adapter"
    """What is saved: the adapter alone."""


class Generate(schema.Section):
    """The pictures of predictions.csv: of `prompts`, or of the captions of the first validation rows."""

    prompts: list[str] | None = Field(default=None, min_length=1)
    """What the pictures of a run show; by default the captions of validation rows."""
    rows: int = Field(default=4, ge=0)
    """How many validation rows the model answers in predictions.csv."""
    num_inference_steps: int = Field(default=30, ge=1)
    """The steps in which a picture is made."""
    guidance_scale: float = Field(default=7.5, ge=0)
    """How closely a picture follows its prompt; up to 1 leaves the comparison with no prompt out."""


class Recipe(schema.Recipe):
    """Adds what trains (`lora`), and the pictures that a run makes.

    `prompt` is as DreamBooth has it ("a photo of sks dog"). Images are cut to a square of `image_size` pixels in their
    middle. `snr_gamma` is usually 5.
    """

    data: Data
    lora: Lora = Lora()
    prompt: str | None = Field(default=None, min_length=1)
    """The caption of every image, in place of a column."""
    image_size: int = Field(default=512, ge=64)
    """The sides of the images in pixels."""
    snr_gamma: float | None = Field(default=None, gt=0)
    """Weighs a timestep by min(SNR, snr_gamma) / SNR; null weighs as the model's script does."""
    generate: Generate = Generate()

    @field_validator("image_size")
    @classmethod
    def _latent(cls, value: int) -> int:
        if value % 64:
            raise ValueError(f"is {value}; allowed: a multiple of 64, which a UNet can halve three times in latents")
        return value

    def wrong(self) -> Iterator[str]:
        if (self.prompt is None) == (self.data.columns.text is None):
            told = f"has {'neither prompt nor' if self.prompt is None else 'prompt and'} data.columns.text"
            yield f"{told}; give one of them: a prompt for all images, or their column"


class ImageGeneration(Task[Recipe]):
    """Learns a style or a subject. A saved model makes a picture of each prompt."""

    auto_class = "DiffusionPipeline"
    pipeline_tag = "text-to-image"
    library = "diffusers"
    metrics = ("mse",)
    truth = ("image",)
    asked: ClassVar[Mapping[str, str]] = {"text": "text"}
    default_columns: ClassVar[Mapping[str, str]] = {"text": "text"}
    at_a_time = 16  # pictures take long, and each should be there soon
    unsharded = "diffusers' models name no layers at which they could be divided"
    family = ("stable-diffusion", "text")
    shows = "pictures"
    _encoders: Any = None

    @classmethod
    def size(cls, recipe: Any) -> tuple[Any, Choice[str]]:
        """Return the configuration of the UNet or transformer in its real size, and where it comes from."""
        source = resolve(recipe.model)
        kind = checkpoint.model_type(recipe.model, recipe.model_type, {}) or cls.family[0]
        if source.local:
            size = diffusion.stored_size(source.source)
            return size, Choice(recipe.model, f"the {diffusion.part_of(size)} of the model itself, without its weights")
        kinds = {name: other for name, (other, _) in checkpoint.KNOWN.items() if other.startswith(cls.family[0])}
        names = [name for name, other in kinds.items() if other == kind]
        if not names:
            raise UserError(f"model_type is {kind}; allowed: {', '.join(dict.fromkeys(kinds.values()))}")
        named = recipe.model if recipe.model in names else names[0]
        size = dict(checkpoint.KNOWN[named][1])
        return size, Choice(recipe.model, f"a {diffusion.part_of(size)} in the size of {named}, without weights")

    @classmethod
    def smoke_model(cls, recipe: Any, folder: Path) -> bool:
        diffusion.write_tiny(cls.size(recipe)[0], folder, recipe.seed)
        return True

    def prepare(self, rows: dict[str, Rows]) -> Prepared:
        from transformers import default_data_collator

        from hf_mps.finetune.models.diffusion_trainer import DiffusionTrainer, FlowTrainer

        recipe = self.recipe
        chosen = self.measures()
        pipeline = self.encoders()
        splits = {split: self.inputs(some) for split, some in rows.items()}
        kind, vae, part = type(pipeline), pipeline.vae.config, diffusion.PIPELINES[type(pipeline).__name__]
        scheduler, says, why = self._objective(pipeline.scheduler, part)
        self._encoders = pipeline = None  # they are done, and leave their memory to the model that trains
        self.model, self.choices["model"] = self.checkpoint.denoiser()
        if recipe.lora is not None:  # a saved model is measured with the adapters that it has
            layers = {"target_modules": recipe.lora.target_modules or diffusion.LAYERS[part]}
            self.model, self.choices["lora"] = lora.apply(self.model, recipe.lora.model_copy(update=layers), None)
        arguments, untrained = _language.untrained(recipe)
        caption = f"one prompt for all: {recipe.prompt}" if recipe.prompt else f"the column {recipe.data.columns.text}"
        self.snippet = snippets()[self.name].format(base=recipe.model)
        return self.made(
            splits=splits,
            collator=default_data_collator,
            metrics=chosen,
            compute_metrics=lambda evaluated: chosen.of({"mse": float(evaluated.predictions.mean())}),
            baseline=untrained,
            choices={
                "images": Choice(
                    f"{recipe.image_size} x {recipe.image_size} pixels", "image_size; cut in their middle"
                ),
                "captions": Choice(caption, f"cut to {diffusion.TOKENS} tokens"),
                "latents": Choice("kept on disk", "images and captions are encoded once, before the model is loaded"),
                "loss": Choice(says, why),
                **self.choices,
            },
            trainer=FlowTrainer if part == diffusion.TRANSFORMER else DiffusionTrainer,
            trainer_settings={
                "scheduler": scheduler,
                "vae": vae,
                "snr_gamma": recipe.snr_gamma,
                "untrained": untrained,
            },
            # Trainer would leave out the columns of latents, which the model's forward pass does not name.
            arguments_defaults={"remove_unused_columns": False, **arguments},
            save=lambda trainer, folder: diffusion.save(trainer, folder, kind),
            predict=self._predict(rows["validation"]),
            figures=_figures,
        )

    def _objective(self, scheduler: Any, part: str) -> tuple[Any, str, str]:
        """Return the scheduler that adds noise, what the model predicts of it, and how timesteps count.

        Raises UserError for what the pipeline's kind does not predict, and where SNR cannot weigh it.
        """
        gamma, diffusers = self.recipe.snr_gamma, diffusion.library()
        if part == diffusion.TRANSFORMER:
            if gamma is not None:
                raise UserError(f"snr_gamma is {gamma:g}, and {self.recipe.model} learns a flow; next: snr_gamma=null")
            made = diffusers.FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
            return made, "flow", "as diffusers' script for SD3: logit-normal timesteps, weighed by sigma squared"
        made = diffusers.DDPMScheduler.from_config(scheduler.config)
        says = made.config.prediction_type
        if says not in ("epsilon", "v_prediction"):
            raise UserError(f"model {self.recipe.model}: it predicts {says}; allowed: epsilon, v_prediction")
        weighed = f"min-SNR weights, gamma {gamma:g}" if gamma else "timesteps count alike"
        return made, says, f"the scheduler's prediction_type; {weighed}"

    def open(self, chosen: Mapping[str, Any]) -> Prepared:
        self.model, self.choices["model"] = self.checkpoint.denoiser()
        return self.made()

    def inputs(self, rows: Rows) -> Any:
        """Return the rows' latents and captions; nothing of rows without images."""
        if "image" not in rows.dataset.column_names:
            return None
        return Latents(self._encoded(rows))

    def _encoded(self, rows: Rows) -> Any:
        """Return rows of one column, `row`: tensors as safetensors, made once and then found again on the disk.

        `moments` is what the VAE says of the image, cut to the recipe's size (mean and logarithm of the variance,
        float32 of shape (2 x channels, side, side)), `embeds` the caption's (tokens, width). SDXL's and SD3's have
        `pooled` (width,), SDXL's `time_ids` (6,) as well: height and width of the image before it was cut, upper and
        left edge, height and width now.
        """
        import torch
        from safetensors.torch import save

        from hf_mps.finetune.run.run_dir import digest_rows

        pipeline, size, prompt, device = self.encoders(), self.recipe.image_size, self.recipe.prompt, self.device
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

    def encoders(self) -> Any:
        """Return the pipeline without the part that trains, loaded where it is needed."""
        if self._encoders is None:
            self._encoders = self.checkpoint.encoders()
        return self._encoders

    def _predict(self, rows: Rows) -> Any:
        """Return `Prepared.predict`: pictures of the recipe's prompts, or of the first validation rows' captions."""
        from datasets import Dataset

        asked = self.recipe.generate
        some = rows.sample(list(range(min(asked.rows, len(rows.dataset)))))
        if asked.prompts is not None:
            some = Rows(Dataset.from_dict({"text": asked.prompts}), "generate.prompts")
        return (lambda trainer: self.answers(trainer, some, None)) if len(some.dataset) else None

    def answers(self, trainer: Any, rows: Rows, inputs: Any, every: bool = False) -> Iterator[dict[str, Any]]:
        """Yield each row's prompt and its picture, whose noise depends on seed and row alone."""
        import torch

        recipe, model = self.recipe, trainer.accelerator.unwrap_model(trainer.model)
        # peft puts its layers inside the base model, so pictures are those of the adapters.
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        pipeline = self.encoders().to(self.device, model.dtype)
        pipeline.register_modules(**{diffusion.PIPELINES[type(pipeline).__name__]: model.eval()})
        columns = rows.dataset.column_names
        batch, each = rows.dataset[:] if "text" in columns else {}, range(len(rows.dataset))
        prompts = captions(rows, None if "text" in columns else recipe.prompt, batch, each)
        if trainer.train_dataset is not None:
            self._encoders = None  # between two evaluations the memory is the training's
        how = recipe.generate.model_dump(include={"num_inference_steps", "guidance_scale"})
        how |= dict.fromkeys(("height", "width"), recipe.image_size)
        for at, prompt in enumerate(prompts):
            # On the CPU, whose numbers for a seed are the same beside every device.
            generator = torch.Generator("cpu").manual_seed(recipe.seed + rows.number(at))
            image = pipeline(prompt, generator=generator, **how).images[0]
            yield {"row": rows.number(at), "prompt": prompt, "picture": Picture(pictures.encoded(image))}

    @classmethod
    def smoke_rows(cls, recipe: Recipe, folder: Path) -> dict[str, list[dict[str, Any]]]:
        # A plan encodes them at full size for each change that it tries; a smoke run's epoch has few steps as it is.
        return {split: rows[:MADE_UP] for split, rows in super().smoke_rows(recipe, folder).items()}

    @staticmethod
    def smoke_row(recipe: Recipe, made: synthetic.MadeUp) -> dict[str, Any]:
        """Write an image of one colour, which its caption names."""
        name = f"{made.split}/{made.number:03}.png"
        colour = synthetic.plain_image(made.draw, made.folder, name, SMOKE_SIZE)
        return {"image": name, "text": f"a {colour} picture"}


def _figures(predicted: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    return pictures.grid([(row["prompt"], row["picture"]) for row in predicted])


def captions(rows: Rows, prompt: str | None, batch: Mapping[str, list[Any]], indices: Sequence[int]) -> list[str]:
    """Return each row's caption, or `prompt` for all. Raises UserError for a row without text."""
    return tokens.texts(rows, "text", batch, indices) if prompt is None else [prompt] * len(indices)


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
