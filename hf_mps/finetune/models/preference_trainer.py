"""TRL's DPOTrainer with an evaluation over pairs: rewards of each pair, never averaged by batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from trl import DPOConfig, DPOTrainer

from hf_mps.finetune.metrics.chosen import Chosen


@dataclass
class Arguments(DPOConfig):  # type: ignore[misc]
    """DPOConfig with what TrainingArguments has by default: TRL's own turn bf16 and checkpointing on by themselves."""

    bf16: bool = False
    gradient_checkpointing: bool | None = None


class PreferenceTrainer(DPOTrainer):  # type: ignore[misc]
    """DPOTrainer whose evaluations give (reward of the chosen answer, reward of the rejected one) for each pair.

    It sends no telemetry, which TRL's own trainers do (trl/trainer/base_trainer.py), and leaves the model card to the
    runner.
    """

    precompute_ref_logps: bool

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The batch's loss and rewards of shape (pairs, 2), float32; two passes, one of them the reference's."""
        inputs = self._prepare_inputs(inputs)
        watched = _Watched(model)
        with torch.no_grad(), self.compute_loss_context_manager():
            reference = self.compute_ref_log_probs(self.ref_model or model, inputs)
            known = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
            with self._reference_known():
                loss = self.compute_loss(watched, {**inputs, **known})
            policy = watched.log_probs.sum(dim=1).chunk(2)
        rewards = [self.beta * (ours - theirs).float() for ours, theirs in zip(policy, reference, strict=True)]
        pairs = torch.stack(rewards, dim=1)
        return (
            loss.detach().mean(),
            None if prediction_loss_only else pairs,
            None if prediction_loss_only else pairs[:, 0],
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            self._metrics["eval"].clear()  # TRL's means of batches; the exact ones are in `logs` already
        super().log(logs, start_time)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None here: the runner writes one."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """As the task made it: TRL's own would render and tokenise texts, and these are ids."""
        return dataset

    def _send_telemetry(self) -> None:
        """None is sent."""

    @contextmanager
    def _reference_known(self) -> Iterator[None]:
        """Let the loss take the reference's log-probabilities from the batch."""
        before, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            yield
        finally:
            self.precompute_ref_logps = before


class _Watched:
    """A model that keeps the log-probabilities of its last pass, shape (2 pairs, tokens - 1), 0 outside the answers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.log_probs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        found = self._model(**inputs)
        self.log_probs = found.log_probs
        return found


def measured(pairs: Any, chosen: Chosen) -> dict[str, float]:
    """The numbers of a split from its pairs' rewards, shape (pairs, 2): TRL's names, over every pair alike."""
    better, worse = numpy.asarray(pairs, dtype=numpy.float64).T
    values = {
        "rewards/accuracies": float((better > worse).mean()),
        "rewards/margins": float((better - worse).mean()),
    }
    return chosen.of(values)
