"""TRL's ORPOTrainer with evaluations that return the rewards of each pair, never means over batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from trl.import_utils import TRLExperimentalWarning

from hf_mps.core import notices
from hf_mps.finetune.models.preference_trainer import RewardTrainer
from hf_mps.finetune.models.trainer_mixins import PlainArguments

with notices.ignoring(TRLExperimentalWarning):  # the recipe asks for it by its task
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer


@dataclass
class Arguments(PlainArguments, ORPOConfig):  # type: ignore[misc]
    """ORPOConfig with TrainingArguments' defaults."""

    remove_unused_columns: bool = False


class OddsTrainer(RewardTrainer, ORPOTrainer):  # type: ignore[misc]
    """ORPOTrainer over DPO's batches, whose evaluations return the rewards of a pair as DPO's do.

    A reward is `beta` times the mean log-probability of the answer's tokens: there is no reference model.
    """

    _stored_metrics: Any

    def rewards(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the loss, and rewards of shape (pairs, 2)."""
        loss, _ = self.get_batch_loss_metrics(model, inputs, "eval")
        return loss, self._pairs

    def get_batch_loss_metrics(self, model: Any, batch: Mapping[str, Any], train_eval: str = "train") -> Any:
        """Return TRL's loss and measures of DPO's batch, in which the chosen answers are above the rejected ones."""
        ids = batch["input_ids"]
        columns = {"input_ids": ids, "attention_mask": batch["attention_mask"]}
        columns["labels"] = ids.masked_fill(batch["completion_mask"] == 0, -100)
        sides: dict[str, Any] = {}
        for name, column in columns.items():
            sides[f"chosen_{name}"], sides[f"rejected_{name}"] = column.chunk(2)
        return super().get_batch_loss_metrics(model, sides, train_eval)

    def odds_ratio_loss(self, *log_probs: Any) -> Any:
        """Return TRL's losses and rewards; the rewards of each pair are kept for `rewards`."""
        losses, chosen, rejected, *others = super().odds_ratio_loss(*log_probs)
        self._pairs = torch.stack([chosen, rejected], dim=1)
        return losses, chosen, rejected, *others

    @staticmethod
    def tokenize_row(row: Any) -> Any:
        """Return the row unchanged: the task has tokenised it."""
        return row

    def _kept(self) -> dict[str, Any]:
        return {"metrics": dict(self._stored_metrics["train"])}

    def _put_back(self, kept: dict[str, Any]) -> None:
        self._stored_metrics["train"].update(kept["metrics"])
