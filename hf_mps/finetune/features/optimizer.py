"""Which optimizer steps, at which learning rate."""

from __future__ import annotations

from hf_mps.core.choice import Choice
from hf_mps.finetune.features.base import SAID, Draft, Feature


class Optimizer(Feature):
    """Trainer's default, or the recipe's."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `optimizer`."""
        rate = draft.training.get("learning_rate", 5e-5)
        if "optim" in draft.training:
            found = Choice(draft.training["optim"], f"{SAID}; learning rate {rate:g}")
        else:
            from transformers import TrainingArguments

            found = Choice(str(TrainingArguments.default_optim), f"Trainer's default; learning rate {rate:g}")
        draft.choices["optimizer"] = found
