"""What a feature of a run is: one thing that a run decides before it trains, and does while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice

if TYPE_CHECKING:
    from hf_mps.finetune.features.machine import MemoryAdjustments
    from hf_mps.finetune.recipe.resolve import ResolvedRecipe
    from hf_mps.finetune.recipe.schema import Recipe
    from hf_mps.finetune.tasks import Prepared

SAID = "the recipe says so"


@dataclass
class Draft:
    """What is known of a run while its features decide, and what those before have decided.

    `training` has TrainingArguments' keywords that the task wants, memory asks for or the recipe says; the later of
    these wins. `arguments` are keywords where `training` says nothing, `fixed` those that nobody may change.
    """

    resolved: ResolvedRecipe
    prepared: Prepared
    device: str
    output: Choice[Path]
    adjustments: MemoryAdjustments
    training: dict[str, Any]
    choices: dict[str, Choice[Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe as it runs."""
        return self.resolved.recipe

    def setting(self, key: str, default: Any, reason: str) -> Choice[Any]:
        """Return what `training` says of `key`, or else the default with its reason."""
        return Choice(self.training[key], SAID) if key in self.training else Choice(default, reason)


@dataclass(frozen=True)
class Plan:
    """`choices` in the order in which a header shows them; `arguments` are TrainingArguments' keywords."""

    recipe: Recipe
    device: Choice[str]
    choices: dict[str, Choice[Any]]
    arguments: dict[str, Any]
    bucket_pool_size: int | None = None
    """Rows that are drawn together to be sorted by length, where a run resumes in another number of processes."""

    def shown(self) -> dict[str, Choice[Any]]:
        """Return every choice, as the header and results.json have them."""
        every = {"device": self.device, **self.choices}
        return {name: every[name] for name in (*FIRST, *every) if name in every}


# The rows that a person reads first.
FIRST = ("smoke", "model", "data", "device", "processes", "precision", "batch", "lengths", "steps")


class Feature:
    """One thing that a run decides and does. A subclass has a reason to override each method that it overrides.

    An object of it keeps nothing of a run: what was decided is in the plan's choices, what runs is in the trainer.
    """

    def decide(self, draft: Draft) -> None:
        """Add to the draft's choices and arguments. Raises UserError for what this device or task cannot honour."""

    def try_out(self, plan: Plan, prepared: Prepared, checkpoint: Path | None) -> None:
        """Change the plan of a run that begins now by what the device tells; a plan that is only shown does without."""

    def making(self, plan: Plan, prepared: Prepared) -> AbstractContextManager[Any]:
        """Return what is held open while the trainer is made."""
        return nullcontext()

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Let the trainer do what was decided."""

    def around(self, trainer: Any, plan: Plan) -> AbstractContextManager[Any]:
        """Return what is held open while it trains and evaluates."""
        return nullcontext()

    def outcome(self, trainer: Any, choices: dict[str, Choice[Any]]) -> None:
        """Replace a choice by what came of it, once the training has ended."""


def value_of(choices: Mapping[str, Choice[Any]], key: str) -> Any:
    """Return the value of a choice, None where it was not made."""
    return choices[key].value if key in choices else None
