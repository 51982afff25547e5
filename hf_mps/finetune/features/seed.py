"""What weights, order of the rows and dropout are drawn from."""

from __future__ import annotations

from hf_mps.core.choice import Choice
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import Draft, Feature


class Seed(Feature):
    """The recipe's seed for everything that is drawn."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `seed`."""
        seed = draft.recipe.seed
        draft.choices["seed"] = Choice(seed, "the recipe's seed, for weights, order of the rows and dropout")
        draft.fixed["seed"] = seed
        if not World.here().alone:
            # Else accelerate seeds the order of rows by the state of each rank's own draws (SeedableRandomSampler).
            draft.arguments["data_seed"] = seed
