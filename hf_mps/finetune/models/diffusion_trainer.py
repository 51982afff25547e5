"""transformers' Trainer for a model that learns to predict an image's noise, with the losses of diffusers' scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_snr
from torch import Tensor
from transformers import Trainer

from hf_mps.finetune.models.trainer_mixins import MeasuredBefore

Inputs = Mapping[str, Tensor]
Compared = tuple[Tensor, Tensor, Tensor | None]


class DiffusionTrainer(MeasuredBefore, Trainer):  # type: ignore[misc]
    """Trains a UNet on rows of `hf_mps.finetune.tasks.image_generation.Latents`; `vae` is the VAE's configuration.

    `scheduler` is a DDPMScheduler. `snr_gamma` weighs a row by min(SNR, snr_gamma) / SNR, or / (SNR + 1) where
    velocities are predicted (arXiv 2303.09556); None by 1. An evaluation draws each row's noise and timestep
    from its number.
    """

    def __init__(
        self, *arguments: Any, scheduler: Any, vae: Mapping[str, Any], snr_gamma: float | None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        # The model's forward takes no number of items, and its loss is a mean over rows.
        self.model_accepts_loss_kwargs = False
        self._scheduler, self._snr_gamma = scheduler, snr_gamma
        self._shift, self._scaling = vae.get("shift_factor") or 0.0, vae["scaling_factor"]

    def compute_loss(self, model: Any, inputs: Inputs, return_outputs: bool = False, **_: Any) -> Any:
        """Return the mean of the rows' weighted losses."""
        errors, weights = self._errors(model, inputs)
        loss = (errors * weights).mean()
        return (loss, {"errors": errors}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the batch's loss, and each row's squared error, float32 (B,)."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            errors, weights = self._errors(model, inputs, inputs["number"].tolist())
        loss = (errors * weights).mean()
        # Trainer computes metrics only where there are labels; nobody reads these.
        return (loss, None, None) if prediction_loss_only else (loss, errors, inputs["number"])

    def _errors(self, model: Any, inputs: Inputs, numbers: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's mean squared error, (B,), and its weight; rows with `numbers` have noise of their own."""
        mean, logarithm = inputs["moments"].chunk(2, dim=1)
        spread, noise, timesteps = self._drawn(mean.shape, numbers)
        # As DiagonalGaussianDistribution of diffusers has it.
        sample = mean + (0.5 * logarithm.clamp(-30, 20)).exp() * spread.to(mean.device)
        latents = (sample - self._shift) * self._scaling
        told, target, weights = self._compared(model, inputs, latents, noise.to(mean.device), timesteps)
        errors = torch.nn.functional.mse_loss(told.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))
        return errors, torch.ones_like(errors) if weights is None else weights

    def _compared(self, model: Any, inputs: Inputs, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Compared:
        """Return what the model predicts of latents with noise, what it should predict, and rows' weights, if any.

        `timesteps` are those of `_timesteps`, on the CPU.
        """
        scheduler, timesteps = self._scheduler, timesteps.to(latents.device)
        noisy = scheduler.add_noise(latents, noise, timesteps)
        embeds = inputs["embeds"]
        added = {"text_embeds": inputs["pooled"], "time_ids": inputs["time_ids"]} if "pooled" in inputs else None
        told = model(noisy.to(embeds.dtype), timesteps, embeds, added_cond_kwargs=added, return_dict=False)[0]
        velocity = scheduler.config.prediction_type == "v_prediction"
        target = scheduler.get_velocity(latents, noise, timesteps) if velocity else noise
        if self._snr_gamma is None:
            return told, target, None
        snr = compute_snr(scheduler, timesteps)
        return told, target, snr.clamp(max=self._snr_gamma) / (snr + 1 if velocity else snr)

    def _timesteps(self, rows: int, generator: torch.Generator | None) -> Tensor:
        """Draw places in the scheduler's table of timesteps, (rows,)."""
        return torch.randint(0, self._scheduler.config.num_train_timesteps, (rows,), generator=generator, device="cpu")

    def _drawn(self, shape: Sequence[int], numbers: Sequence[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the latents of `shape` and their noise are made of, and timesteps (B,)."""

        def draw(rows: int, generator: torch.Generator | None) -> list[Tensor]:
            some = (rows, *shape[1:])
            # On the CPU, whose numbers every device has alike and checkpoints hold.
            normal = [torch.randn(some, generator=generator, device="cpu") for _ in range(2)]
            return [*normal, self._timesteps(rows, generator)]

        if numbers is None:
            return tuple(draw(shape[0], None))  # type: ignore[return-value]
        each = [draw(1, torch.Generator("cpu").manual_seed(number)) for number in numbers]
        return tuple(torch.cat(some) for some in zip(*each, strict=True))  # type: ignore[return-value]


class FlowTrainer(DiffusionTrainer):
    """Trains a transformer that predicts the straight way from an image's latents to noise (arXiv 2403.03206).

    As diffusers' train_dreambooth_lora_sd3.py does by default: timesteps are drawn by the logit-normal density, and a
    row's error is weighed by the square of its sigma, which preconditioned outputs come to. `scheduler` is a
    FlowMatchEulerDiscreteScheduler.
    """

    def _timesteps(self, rows: int, generator: torch.Generator | None) -> Tensor:
        steps: int = self._scheduler.config.num_train_timesteps
        density = compute_density_for_timestep_sampling("logit_normal", rows, 0.0, 1.0, generator=generator)
        return torch.as_tensor(density * steps).long()

    def _compared(self, model: Any, inputs: Inputs, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Compared:
        tables = self._scheduler.sigmas, self._scheduler.timesteps
        sigmas, times = (table[timesteps].to(latents.device) for table in tables)
        noisy = torch.lerp(latents, noise, sigmas[:, None, None, None])
        texts = {"encoder_hidden_states": inputs["embeds"], "pooled_projections": inputs["pooled"]}
        told = model(hidden_states=noisy.to(inputs["embeds"].dtype), timestep=times, **texts, return_dict=False)[0]
        return told, noise - latents, sigmas.square()
