"""TRL's DPOTrainer with an evaluation over pairs: the rewards of each pair, never means over batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from trl import DPOConfig, DPOTrainer

from hf_mps.finetune.models import quantization
from hf_mps.finetune.models.trainer_mixins import PlainArguments, QuietTrl
from hf_mps.metrics.selection import Chosen


@dataclass
class Arguments(PlainArguments, DPOConfig):  # type: ignore[misc]
    """DPOConfig with TrainingArguments' defaults."""


class PreferenceTrainer(QuietTrl, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer whose evaluations return (reward of the chosen answer, reward of the rejected one) for each pair."""

    precompute_ref_logps: bool

    def __init__(self, model: Any, *arguments: Any, **settings: Any) -> None:
        if "ref" in getattr(model, "peft_config", ()):
            model.delete_adapter("ref")  # that of an earlier trainer of this model, which TRL makes anew
        with quantization.adapters_kept(model):
            super().__init__(model, *arguments, **settings)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the batch's loss and rewards of shape (pairs, 2), float32; one of the two passes is the
        reference's.
        """
        inputs = self._prepare_inputs(inputs)
        recorder = _LogProbRecorder(model)
        with torch.no_grad(), self.compute_loss_context_manager():
            reference = self.compute_ref_log_probs(self.ref_model or model, inputs)
            reference_logps = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
            before, self.precompute_ref_logps = self.precompute_ref_logps, True  # the loss reads them from the batch
            loss = self.compute_loss(recorder, {**inputs, **reference_logps})
            self.precompute_ref_logps = before
            policy = recorder.log_probs.sum(dim=1).chunk(2)
        rewards = [self.beta * (ours - theirs).float() for ours, theirs in zip(policy, reference, strict=True)]
        pairs = torch.stack(rewards, dim=1)
        loss = loss.detach().mean()
        return (loss, None, None) if prediction_loss_only else (loss, pairs, pairs[:, 0])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.model.training:
            self._metrics["eval"].clear()  # TRL's means of batches; the exact ones are in `logs` already
        super().log(logs, start_time)

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """Return the data set unchanged: TRL would render and tokenise texts, and the task has done so."""
        return dataset


class _LogProbRecorder:
    """A model that keeps its last pass's log-probabilities, shape (2 pairs, tokens - 1), 0 outside the answers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.log_probs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        output = self._model(**inputs)
        self.log_probs = output.log_probs
        return output


def measured(pairs: Any, chosen: Chosen) -> dict[str, float]:
    """Return a split's metrics under TRL's names from its pairs' rewards, shape (pairs, 2), every pair weighted
    alike.
    """
    better, worse = numpy.asarray(pairs, dtype=numpy.float64).T
    values = {"rewards/accuracies": float((better > worse).mean()), "rewards/margins": float((better - worse).mean())}
    return chosen.of(values)
