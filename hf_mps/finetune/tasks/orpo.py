"""Preference tuning in one pass (ORPO): a model learns the better of two answers, and to prefer it to the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hf_mps.finetune.tasks._preference import SETTLED, PairRecipe, PairTask

NO_ENCODER = "it is for encoder-decoder models, and the task trains decoders; leave it out"


class Recipe(PairRecipe):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes ORPOConfig's `beta`."""

    task: Literal["orpo"]
    """What the model learns to do."""


class ORPO(PairTask):
    """Learns one of two answers, and to prefer it to the other."""

    name = "orpo"
    recipe_class = Recipe
    arguments_source = ("trl/experimental/orpo/orpo_config.py", "ORPOConfig")
    settled: ClassVar[Mapping[str, str]] = {
        **SETTLED,
        **dict.fromkeys(("max_completion_length", "is_encoder_decoder"), NO_ENCODER),
        "padding_value": "it is the tokenizer's; leave it out",
        "generate_during_eval": "predictions.csv has the rewards of the validation rows; leave it out",
    }

    def kinds(self) -> tuple[type[Any], type[Any]]:
        from hf_mps.finetune.models.odds_trainer import Arguments, OddsTrainer

        return Arguments, OddsTrainer
