"""transformers' Trainer for a UNet that learns to tell an image's noise, with the loss of diffusers' own scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.training_utils import compute_snr
from torch import Tensor
from transformers import Trainer

from hf_mps.finetune.models.trainer_mixins import MeasuredBefore


class DiffusionTrainer(MeasuredBefore, Trainer):  # type: ignore[misc]
    """Trains on rows of `hf_mps.finetune.media.latents.Latents`, whose latents are multiplied by `scaling`.

    `scheduler` is a DDPMScheduler. `snr_gamma` weighs a row by min(SNR, snr_gamma) / SNR, or / (SNR + 1) where
    velocities are predicted (arXiv 2303.09556); None by 1. An evaluation draws each row's noise and timestep
    from its number.
    """

    def __init__(
        self, *arguments: Any, scheduler: Any, scaling: float, snr_gamma: float | None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        # A UNet's forward takes no number of items, and its loss is a mean over rows.
        self.model_accepts_loss_kwargs = False
        self._scheduler, self._scaling, self._snr_gamma = scheduler, scaling, snr_gamma

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
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

    def _errors(
        self, model: Any, inputs: Mapping[str, Tensor], numbers: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return each row's mean squared error, (B,), and its weight; rows with `numbers` have noise of their own."""
        moments, scheduler = inputs["moments"], self._scheduler
        mean, logarithm = moments.chunk(2, dim=1)
        spread, noise, timesteps = self._drawn(mean.shape, numbers)
        # As DiagonalGaussianDistribution of diffusers has it.
        latents = (mean + (0.5 * logarithm.clamp(-30, 20)).exp() * spread.to(mean.device)) * self._scaling
        noise, timesteps = noise.to(mean.device), timesteps.to(mean.device)
        noisy = scheduler.add_noise(latents, noise, timesteps)
        embeds = inputs["embeds"]
        added = {"text_embeds": inputs["pooled"], "time_ids": inputs["time_ids"]} if "pooled" in inputs else None
        told = model(noisy.to(embeds.dtype), timesteps, embeds, added_cond_kwargs=added, return_dict=False)[0]
        velocity = scheduler.config.prediction_type == "v_prediction"
        target = scheduler.get_velocity(latents, noise, timesteps) if velocity else noise
        errors = torch.nn.functional.mse_loss(told.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))
        if self._snr_gamma is None:
            return errors, torch.ones_like(errors)
        snr = compute_snr(scheduler, timesteps)  # type: ignore[no-untyped-call]
        return errors, snr.clamp(max=self._snr_gamma) / (snr + 1 if velocity else snr)

    def _drawn(self, shape: Sequence[int], numbers: Sequence[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the latents of `shape` and their noise are made of, and timesteps (B,).

        All on the CPU, whose numbers every device has alike and checkpoints hold.
        """
        steps = self._scheduler.config.num_train_timesteps

        def draw(rows: int, generator: torch.Generator | None) -> list[Tensor]:
            some = (rows, *shape[1:])
            normal = [torch.randn(some, generator=generator, device="cpu") for _ in range(2)]
            return [*normal, torch.randint(0, steps, (rows,), generator=generator, device="cpu")]

        if numbers is None:
            return tuple(draw(shape[0], None))  # type: ignore[return-value]
        each = [draw(1, torch.Generator("cpu").manual_seed(number)) for number in numbers]
        return tuple(torch.cat(some) for some in zip(*each, strict=True))  # type: ignore[return-value]
