"""Preference tuning (DPO): a model learns to prefer one of two answers, measured against itself before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hf_mps.finetune.models import language
from hf_mps.finetune.tasks._preference import SETTLED, WHOLE, PairRecipe, PairTask


class Recipe(PairRecipe):
    """Adds the chat template (`plain`, or a Jinja file). `training` takes DPOConfig's `beta`, `loss_type` and so on."""

    task: Literal["dpo"]
    """What the model learns to do."""


class DPO(PairTask):
    """Learns to prefer one of two answers, from its start on."""

    name = "dpo"
    recipe_class = Recipe
    arguments_source = ("trl/trainer/dpo_config.py", "DPOConfig")
    settled: ClassVar[Mapping[str, str]] = {
        **SETTLED,
        "truncation_mode": "the task cuts the answers' ends itself; leave it out",
        "pad_to_multiple_of": "it is a key of the recipe itself: pad_to_multiple_of: N",
        "use_weighting": "the rewards that are measured are those of the unweighted loss; leave it out",
        "ld_alpha": "the rewards that are measured are those of whole answers; leave it out",
    }
    unsharded = WHOLE

    def kinds(self) -> tuple[type[Any], type[Any]]:
        from hf_mps.finetune.models.preference_trainer import PairArguments, PairTrainer

        return PairArguments, PairTrainer

    def reference(self) -> Any:
        return language.started_from(self.recipe)
