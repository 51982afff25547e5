"""TRL's DPOTrainer and KTOTrainer with evaluations that return the reward of each answer, never means over batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import numpy
import torch
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from hf_mps.finetune.models import quantization
from hf_mps.finetune.models.trainer_mixins import KeptInCheckpoints, PlainArguments, QuietTrl


@dataclass
class PairArguments(PlainArguments, DPOConfig):  # type: ignore[misc]
    """DPOConfig with TrainingArguments' defaults."""


@dataclass
class AnswerArguments(PlainArguments, KTOConfig):  # type: ignore[misc]
    """KTOConfig with TrainingArguments' defaults."""

    train_sampling_strategy: str = "random"


class RewardTrainer(KeptInCheckpoints, QuietTrl):
    """A part of TRL's preference trainers: an evaluation returns the rewards of each row (`rewards`).

    A checkpoint holds the measures that are still to be logged.
    """

    KEPT = "measures_{}.pth"
    args: Any

    def __init__(self, model: Any, *arguments: Any, **settings: Any) -> None:
        if "ref" in getattr(model, "peft_config", ()):
            model.delete_adapter("ref")  # that of an earlier trainer of this model, which TRL makes anew
        with quantization.adapters_kept(model):
            super().__init__(model, *arguments, **settings)  # type: ignore[call-arg]

    def rewards(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the loss of a batch, and the rewards of its rows, float32."""
        raise NotImplementedError

    @staticmethod
    def measured(evaluated: Any) -> dict[str, float]:
        """Return the measures of a split under TRL's names from its pairs' rewards, shape (pairs, 2)."""
        better, worse = numpy.asarray(evaluated.predictions, dtype=numpy.float64).T
        right, margin = float((better > worse).mean()), float((better - worse).mean())
        return {"rewards/accuracies": right, "rewards/margins": margin}

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Return the batch's loss, its rows' rewards, and their labels (without labels, the rewards' first column)."""
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
            loss, rewards = self.rewards(model, inputs)
        # Trainer computes metrics only where there are labels; nobody reads the pairs' own.
        loss, labels = loss.detach().mean(), inputs["label"] if "label" in inputs else rewards[:, 0]
        return (loss, None, None) if prediction_loss_only else (loss, rewards, labels)


class ReferencedTrainer(RewardTrainer):
    """A RewardTrainer whose rewards are `beta` times how much likelier an answer is than to a reference model."""

    REFERENCE: ClassVar[tuple[str, str]]
    """The columns of a batch in which TRL's loss reads what `compute_ref_log_probs` returns."""
    beta: float
    model: Any
    ref_model: Any
    _metrics: Any
    _total_train_tokens: int

    def changes(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the batch's loss, and `beta` times the change of each answer's log-probability, shape (answers,).

        One of the two passes is the reference's.
        """
        recorder = _LogProbRecorder(model)
        reference = self.compute_ref_log_probs(self.ref_model or model, inputs)  # type: ignore[attr-defined]
        found = dict(zip(self.REFERENCE, reference, strict=True))
        with patch.object(self, "precompute_ref_logps", True):  # the loss reads them from the batch
            loss = self.compute_loss(recorder, {**inputs, **found})  # type: ignore[attr-defined]
        ours = recorder.log_probs.sum(dim=1)
        # Of KTO only the first are the answers'; the rest are of the other pairs (KL).
        theirs = torch.cat([one for one in reference if one is not None])[: len(ours)]
        return loss, self.beta * (ours - theirs).float()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does; of an evaluation without means over batches, as the exact ones are in `logs` already."""
        if not self.model.training:
            self._metrics["eval"].clear()
        super().log(logs, start_time)  # type: ignore[misc]

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """Return the data set unchanged: TRL would render and tokenise texts, and the task has done so."""
        return dataset

    def _kept(self) -> dict[str, Any]:
        return {"metrics": dict(self._metrics["train"]), "tokens": self._total_train_tokens}

    def _put_back(self, kept: dict[str, Any]) -> None:
        self._metrics["train"].update(kept["metrics"])
        self._total_train_tokens = kept["tokens"]


class PairTrainer(ReferencedTrainer, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer whose evaluations return (reward of the chosen answer, reward of the rejected one) for each pair."""

    REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")

    def rewards(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the loss, and rewards of shape (pairs, 2)."""
        loss, changes = self.changes(model, inputs)
        return loss, torch.stack(changes.chunk(2), dim=1)


class AnswerTrainer(ReferencedTrainer, KTOTrainer):  # type: ignore[misc]
    """KTOTrainer whose evaluations return the reward of each answer, and whether it is wanted.

    Its collator says which other answer each prompt is paired with for the divergence. So rows may be drawn in any
    order, where TRL's own pairs follow from the order of the rows and allow no other.
    """

    REFERENCE = ("ref_logps", "ref_KL_logps")

    def __init__(self, model: Any, *arguments: Any, args: Any, **settings: Any) -> None:
        # TRL refuses any other, as its own pairs follow from the order (kto_trainer.py).
        with patch.object(args, "train_sampling_strategy", "sequential"):
            super().__init__(model, *arguments, args=args, **settings)

    @staticmethod
    def measured(evaluated: Any) -> dict[str, float]:
        """Return the mean reward of a split's wanted answers less that of the others, from rewards (answers,)."""
        rewards, wanted = numpy.asarray(evaluated.predictions, dtype=numpy.float64), numpy.asarray(evaluated.label_ids)
        return {"rewards/margins": float(rewards[wanted].mean() - rewards[~wanted].mean())}

    def rewards(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the loss, and rewards of shape (answers,)."""
        return self.changes(model, inputs)


class _LogProbRecorder:
    """A model that keeps its last pass's log-probabilities, shape (answers, tokens - 1), 0 outside the answers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.log_probs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        output = self._model(**inputs)
        self.log_probs = output.log_probs
        return output
