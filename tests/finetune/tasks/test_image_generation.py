"""LoRA of diffusion models: the loss of diffusers' own scripts, files that its pipelines load, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inline_snapshot import snapshot
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint, diffusion
from hf_mps.finetune.models.checkpoint import resolve
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.tasks import image_generation
from tests.finetune import builders
from tests.finetune.run_files import results
from tests.finetune.tiny import Command
from tests.snapshots import masked

pytestmark = pytest.mark.usefixtures("own_cache")
diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional dependency")

LAYERS = ["to_k", "to_q", "to_v", "to_out.0"]
LAYERS_OF_SD3 = [f"attn.{name}" for name in (*LAYERS, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")]
SD3 = "stable-diffusion-3"
COLOURS = ((200, 40, 40), (40, 80, 200), (40, 180, 60), (220, 200, 40))
SMALL = ("image_size=64", "generate.num_inference_steps=2", "generate.rows=1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline of each kind; that of SD3 is a small 3.5 medium, whose first blocks attend twice."""
    place = tmp_path_factory.mktemp("diffusion")
    for kind, size in checkpoint.KNOWN.values():
        if kind.startswith("stable-diffusion") and not (place / kind).exists():
            diffusion.write_tiny(size, place / kind, 0)
    return place


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pictures with captions, of different sizes, in the current folder."""
    place = tmp_path / "photos"
    place.mkdir()
    lines = []
    for number in range(6):
        colours = Image.new("RGB", (96 + 8 * number, 80), COLOURS[number % 4])
        colours.paste(COLOURS[(number + 1) % 4], (0, 0, 30 + number, 40))
        colours.save(place / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": f"picture {number}"}))
    (place / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return place


@pytest.fixture
def train(photos: Path, models: Path, finetune: Command) -> Callable[..., Path]:
    def run(kind: str, *words: str, code: int = 0) -> Path:
        data = ("data.folder=photos", "data.hold_out=0.34", "output_dir=run")
        data += () if any(word.startswith("prompt=") for word in words) else ("data.text=text",)
        ended = finetune("image-generation/lora", f"model={models / kind}", *data, *SMALL, *words)
        assert (ended.code, ended.err) == (code, "")
        return Path("run")

    return run


def prepared(model: Path, photos: Path, **keys: Any) -> Any:
    files = dict.fromkeys(("train", "validation"), str(photos / "metadata.jsonl"))
    data = {"files": files, "columns": {"image": "file_name", "text": "text"}}
    return builders.prepare(task="image-generation", model=str(model), data=data, image_size=64, **keys)


def started(made: Any, folder: Path, **settings: Any) -> tuple[Any, list[torch.Tensor]]:
    """A trainer whose adapters all act from the start, and a list that gets the random state of each of its steps."""
    states: list[torch.Tensor] = []

    class Draws(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            states.append(torch.get_rng_state())

    draw = torch.Generator().manual_seed(3)
    for name, weight in made.model.named_parameters():
        if "lora_" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=draw)
    how = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}
    trainer = builders.trainer(made, folder, max_steps=4, learning_rate=1e-2, **how, **settings)
    trainer.add_callback(Draws())
    return trainer, states


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Script:
    """What diffusers' train_text_to_image_lora.py and its sibling for SDXL do, on the CPU, from their own classes."""

    def __init__(self, model: Path, gamma: float | None) -> None:
        self.large, self.gamma = model.name.endswith("xl"), gamma
        pipeline = diffusers.DiffusionPipeline.from_pretrained(model)
        self.vae, self.unet = pipeline.vae, pipeline.unet
        self.readers = [(pipeline.tokenizer, pipeline.text_encoder)]
        if self.large:
            self.readers.append((pipeline.tokenizer_2, pipeline.text_encoder_2))
        self.scheduler = diffusers.DDPMScheduler.from_pretrained(model, subfolder="scheduler")
        self.unet.requires_grad_(False)
        self.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=LAYERS))

    def pixels(self, file: Path) -> tuple[torch.Tensor, list[float]]:
        """The image by the script's transforms (Resize, CenterCrop, ToTensor, Normalize), and SDXL's time ids."""
        image = Image.open(file)
        width, height = (int(64 * side / min(image.size)) for side in image.size)
        left, upper = round((width - 64) / 2.0), round((height - 64) / 2.0)
        cut = image.resize((width, height), Image.Resampling.LANCZOS).crop((left, upper, left + 64, upper + 64))
        values = torch.tensor(list(cut.tobytes()), dtype=torch.float32).view(64, 64, 3).permute(2, 0, 1) / 255
        return ((values - 0.5) / 0.5).contiguous(), [image.height, image.width, upper, left, 64, 64]

    @torch.no_grad()
    def read(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        found, pooled = [], None
        for tokenizer, encoder in self.readers:
            how = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
            ids = tokenizer(captions, **how, return_tensors="pt").input_ids
            if not self.large:
                return encoder(ids, return_dict=False)[0], None
            said = encoder(ids, output_hidden_states=True, return_dict=False)
            pooled = said[0]
            found.append(said[-1][-2])
        return torch.cat(found, dim=-1), pooled

    def loss(self, photos: Path, numbers: list[int], state: torch.Tensor) -> torch.Tensor:
        from diffusers.training_utils import compute_snr

        seen = [self.pixels(photos / f"{number}.png") for number in numbers]
        embeds, pooled = self.read([f"picture {number}" for number in numbers])
        torch.set_rng_state(state)
        images = torch.stack([pixels for pixels, _ in seen])
        with torch.no_grad():
            latents = self.vae.encode(images).latent_dist.sample()
        # The VAE's last convolution leaves its channels last, in whose order `randn_like` would draw.
        latents = latents.contiguous() * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, self.scheduler.config.num_train_timesteps, (len(numbers),)).long()
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        added = {"text_embeds": pooled, "time_ids": torch.tensor([ids for _, ids in seen])} if self.large else None
        told = self.unet(noisy, timesteps, embeds, added_cond_kwargs=added, return_dict=False)[0]
        velocity = self.scheduler.config.prediction_type == "v_prediction"
        target = self.scheduler.get_velocity(latents, noise, timesteps) if velocity else noise
        if self.gamma is None:
            return torch.nn.functional.mse_loss(told.float(), target.float(), reduction="mean")
        snr = compute_snr(self.scheduler, timesteps)
        weights = torch.stack([snr, self.gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
        weights = weights / (snr + 1) if velocity else weights / snr
        each = torch.nn.functional.mse_loss(told.float(), target.float(), reduction="none")
        return (each.mean(dim=list(range(1, each.ndim))) * weights).mean()

    def train(self, photos: Path, states: list[torch.Tensor]) -> list[float]:
        trained = [weight for weight in self.unet.parameters() if weight.requires_grad]
        optimizer, found = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0), []
        for at, state in enumerate(states):
            loss = self.loss(photos, [2 * at % 6, 2 * at % 6 + 1], state)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found


class ScriptOfSD3(Script):
    """What diffusers' train_dreambooth_lora_sd3.py does with its defaults, on the CPU, from its own classes."""

    def __init__(self, model: Path) -> None:
        pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(model)
        self.vae, self.unet = pipeline.vae, pipeline.transformer
        self.clips = [(pipeline.tokenizer, pipeline.text_encoder), (pipeline.tokenizer_2, pipeline.text_encoder_2)]
        self.t5 = pipeline.tokenizer_3, pipeline.text_encoder_3
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(model, subfolder="scheduler")
        self.unet.requires_grad_(False)
        lora = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=LAYERS_OF_SD3)
        self.unet.add_adapter(lora)

    @torch.no_grad()
    def read(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        how = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "pt"}
        said = [read(words(captions, **how).input_ids, output_hidden_states=True) for words, read in self.clips]
        clip = torch.cat([one.hidden_states[-2] for one in said], dim=-1)
        words, read = self.t5
        t5 = read(words(captions, add_special_tokens=True, **how).input_ids)[0]
        clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return torch.cat([clip, t5], dim=-2), torch.cat([one[0] for one in said], dim=-1)

    def loss(self, photos: Path, numbers: list[int], state: torch.Tensor) -> torch.Tensor:
        from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

        images = torch.stack([self.pixels(photos / f"{number}.png")[0] for number in numbers])
        embeds, pooled = self.read([f"picture {number}" for number in numbers])
        torch.set_rng_state(state)
        with torch.no_grad():
            latents = self.vae.encode(images).latent_dist.sample().contiguous()
        latents = (latents - self.vae.config.shift_factor) * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        scheme = "logit_normal"
        density = compute_density_for_timestep_sampling(scheme, len(numbers), 0.0, 1.0, 1.29)
        indices = (density * self.scheduler.config.num_train_timesteps).long()
        timesteps = self.scheduler.timesteps[indices]
        at = [(self.scheduler.timesteps == timestep).nonzero().item() for timestep in timesteps]
        sigmas = self.scheduler.sigmas[at][:, None, None, None]
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        told = self.unet(noisy, embeds, pooled, timesteps, return_dict=False)[0]
        told = told * (-sigmas) + noisy
        weights = compute_loss_weighting_for_sd3(scheme, sigmas)
        return (weights.float() * (told.float() - latents.float()) ** 2).reshape(len(numbers), -1).mean(1).mean()


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("kind", "gamma", "prediction"),
    [
        ("stable-diffusion", None, "epsilon"),
        ("stable-diffusion", 5.0, "epsilon"),
        ("stable-diffusion", 5.0, "v_prediction"),
        ("stable-diffusion-xl", None, "epsilon"),
        (SD3, None, "flow"),
    ],
)
def test_each_steps_loss_and_the_weights_are_those_of_diffusers_own_script(
    kind: str, gamma: float | None, prediction: str, models: Path, photos: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(models / kind, tmp_path / kind)
    if prediction != "flow":
        scheduler = model / "scheduler" / "scheduler_config.json"
        says = json.loads(scheduler.read_text(encoding="utf-8")) | {"prediction_type": prediction}
        scheduler.write_text(json.dumps(says), encoding="utf-8")
    made = prepared(model, photos, snr_gamma=gamma)
    trainer, states = started(made, tmp_path / "ours", use_cpu=True)
    script = ScriptOfSD3(model) if prediction == "flow" else Script(model, gamma)
    begun = get_peft_model_state_dict(made.model)
    set_peft_model_state_dict(script.unet, {name.removeprefix("base_model.model."): w for name, w in begun.items()})
    trainer.train()
    theirs = script.train(photos, states)
    assert losses(trainer) == pytest.approx(theirs, rel=1e-4)
    assert len(set(theirs)) == 4
    ours = get_peft_model_state_dict(trainer.model)
    for name, weight in get_peft_model_state_dict(script.unet).items():
        torch.testing.assert_close(ours[f"base_model.model.{name}"], weight, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_the_device_draws_the_noise_that_the_cpu_draws(models: Path, photos: Path, tmp_path: Path) -> None:
    found = {}
    for device in ("mps", "cpu"):
        made = prepared(models / "stable-diffusion", photos)
        trainer, _ = started(made, tmp_path / device, use_cpu=device == "cpu")
        assert trainer.args.device.type == device
        trainer.train()
        found[device] = [*losses(trainer), trainer.evaluate()["eval_mse"]]
    assert found["mps"] == pytest.approx(found["cpu"], rel=1e-3)


def test_an_evaluation_measures_the_same_noise_each_time_and_in_any_batch(
    models: Path, photos: Path, tmp_path: Path
) -> None:
    made = prepared(models / "stable-diffusion", photos)
    measured = []
    for batch in (4, 4, 1):
        torch.manual_seed(len(measured))
        trainer = builders.trainer(made, tmp_path / "run", per_device_eval_batch_size=batch)
        measured.append(trainer.evaluate()["eval_mse"])
    assert measured[0] == measured[1]
    assert measured[2] == pytest.approx(measured[0], rel=1e-5)


def test_latents_are_made_once_and_anew_for_another_image(
    models: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[Any] = []
    squared = image_generation.squared
    monkeypatch.setattr(image_generation, "squared", lambda image, size: (cut.append(image), squared(image, size))[1])
    before = prepared(models / "stable-diffusion", photos).train[0]
    assert len(cut) == 6  # the validation rows are the same file
    prepared(models / "stable-diffusion", photos)
    assert len(cut) == 6
    Image.new("RGB", (96, 80), (0, 0, 0)).save(photos / "0.png")
    after = prepared(models / "stable-diffusion", photos).train[0]
    assert len(cut) == 12
    assert not torch.equal(before["moments"], after["moments"])
    torch.testing.assert_close(before["embeds"], after["embeds"])


@pytest.mark.rotated
@pytest.mark.parametrize(("kind", "rate"), [("stable-diffusion", 0.02), ("stable-diffusion-xl", 0.02), (SD3, 0.2)])
def test_a_run_leaves_weights_that_diffusers_pipeline_loads(
    kind: str, rate: float, models: Path, photos: Path, train: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(kind, "training.max_steps=3", f"training.learning_rate={rate}", "seed=7")

    said = results(run)
    assert said["metrics"]["mse"] != said["baseline"]["metrics"]["mse"]
    assert (run / "generated.png").stat().st_size > 0
    pipeline = diffusers.DiffusionPipeline.from_pretrained(models / kind, safety_checker=None)
    asked = {
        "prompt": "picture 3",
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "guidance_scale": 7.5,
        "output_type": "np",
    }
    plain = pipeline(**asked, generator=torch.Generator().manual_seed(8)).images
    pipeline.load_lora_weights(run)
    theirs = pipeline(**asked, generator=torch.Generator().manual_seed(8)).images
    trained = pipeline.transformer if kind == SD3 else pipeline.unet
    loaded = get_peft_model_state_dict(trained, adapter_name="default_0")
    ours = load_file(run / "adapter_model.safetensors")
    for name, weight in loaded.items():
        assert torch.equal(ours[f"base_model.model.{name}"], weight)
    assert abs(theirs - plain).max() > 0.05
    Path("asked.csv").write_text("text\npicture 3\n", encoding="utf-8")
    assert main(["predict", "run", "asked.csv", "--out", "answers.csv"]) == 0
    made = numpy.asarray(Image.open("answers.files/000001.png"), dtype=numpy.float32) / 255
    assert abs(made - theirs[0]).max() < 0.02  # one step of 8 bits, and the device's rounding
    capfd.readouterr()
    assert main(["evaluate", "run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["splits"]["validation"]["metrics"]["mse"] == pytest.approx(
        said["metrics"]["mse"], rel=1e-5
    )


@pytest.mark.slow
def test_one_prompt_stands_for_all_images_of_a_folder(train: Callable[..., Path], photos: Path) -> None:
    (photos / "metadata.jsonl").unlink()
    words = ("prompt=a photo of sks dog", "generate.prompts=[sks dog in a bucket]")
    run = train("stable-diffusion", *words, "training.max_steps=1")
    assert (run / "predictions.csv").read_text(encoding="utf-8") == "row,prompt\n1,sks dog in a bucket\n"
    assert results(run)["choices"]["captions"]["value"] == "one prompt for all: a photo of sks dog"


REFUSED = {
    "two captions": ["data.text=text", "prompt=a dog"],
    "no caption": [],
    "no whole latents": ["data.text=text", "image_size=100"],
    "no such layer": ["data.text=text", "image_size=64", "lora.target_modules=[to_x]"],
    "another pipeline": ["data.text=text", "image_size=64", "model=another"],
    "a flow weighed by SNR": ["data.text=text", "image_size=64", "snr_gamma=5"],
}


def test_what_is_refused(models: Path, photos: Path, finetune: Command) -> None:
    another = Path(shutil.copytree(models / "stable-diffusion", "another")) / "model_index.json"
    index = another.read_text(encoding="utf-8").replace("StableDiffusionPipeline", "FluxPipeline")
    another.write_text(index, encoding="utf-8")
    said, of = {}, {"a flow weighed by SNR": SD3}
    for what, words in REFUSED.items():
        model = [] if "model=another" in words else [f"model={models / of.get(what, 'stable-diffusion')}"]
        ended = finetune("image-generation/lora", "data.folder=photos", "data.hold_out=0.34", *model, *words)
        assert (ended.code, ended.out.count("step ")) == (2, 0)
        said[what] = masked(ended.err, recipes=catalogue.folder(), models=models).removeprefix("hf-mps: ").rstrip()
    assert said == snapshot(
        {
            "two captions": "<recipes>/image-generation/lora.yaml: the recipe has prompt and data.columns.text;"
            " give one of them: a prompt for all images, or their column",
            "no caption": "<recipes>/image-generation/lora.yaml: the recipe has neither prompt nor data.columns.text;"
            " give one of them: a prompt for all images, or their column",
            "no whole latents": "command line: image_size is 100; allowed: a multiple of 64, which a UNet can halve"
            " three times in latents",
            "no such layer": "lora.target_modules has 'to_x', and UNet2DConditionModel has no such layer; allowed:"
            " conv, conv1, conv2, conv_in, conv_norm_out, conv_out, conv_shortcut, linear_1, linear_2,"
            " norm, norm1, norm2, norm3, proj, proj_in, proj_out, time_emb_proj, to_k, to_q, to_v; did you mean"
            " 'to_v'?",
            "another pipeline": "model another: it is a FluxPipeline; allowed: StableDiffusionPipeline,"
            " StableDiffusionXLPipeline, StableDiffusion3Pipeline",
            "a flow weighed by SNR": "snr_gamma is 5, and <models>/stable-diffusion-3 learns a flow; next:"
            " snr_gamma=null",
        }
    )


def test_a_model_that_is_not_there_is_one_line(recwarn: pytest.WarningsRecorder) -> None:
    """The hub's client warns of an argument that diffusers gives it."""
    missing = resolve("nobody/nothing")
    for load in (missing.denoiser, missing.encoders):
        with pytest.raises(UserError, match=r"model nobody/nothing is not in the local cache"):
            load()
    assert not [one for one in recwarn if "local_dir_use_symlinks" in str(one.message)]
