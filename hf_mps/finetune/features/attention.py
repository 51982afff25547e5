"""Which attention a run's models compute with: their own, the recipe's word, or in blocks where memory needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.features.base import Draft, Feature, Plan
from hf_mps.layer.fused_step.attention import NAME

if TYPE_CHECKING:
    from hf_mps.finetune.tasks._base import Prepared

KEY, AUTO = "attention", "auto"
SAID = "attention in the recipe"


class Attention(Feature):
    """The models' own, the recipe's word, or in blocks where memory needs that."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `attention`, where it is not the models' own."""
        found = choose(draft.recipe.attention, draft.prepared, draft.adjustments.choices.get(KEY))
        if found is not None:
            draft.choices[KEY] = found

    def making(self, plan: Plan, prepared: Prepared) -> AbstractContextManager[Any]:
        """Set it before a trainer looks at the models."""
        give(prepared, plan.choices.get(KEY))
        return nullcontext()


def choose(word: str, prepared: Prepared, needed: Choice[str] | None = None) -> Choice[str] | None:
    """The attention of a recipe whose key `attention` is `word`, or None for the one that the models have.

    `needed` is what the machine's memory asks for. Raises UserError where a model cannot have what the recipe says.
    """
    if word == AUTO:
        return needed
    if word == NAME:
        from hf_mps.layer.fused_step.attention.interface import obstacle

        models = list(of(prepared))
        why = next(filter(None, map(obstacle, models)), "" if models else "there is no model of transformers")
        if why:
            raise UserError(f"attention is {NAME}, and {why}; next: leave attention out")
    return Choice(word, SAID)


def give(prepared: Prepared, chosen: Choice[str] | None) -> None:
    """Set what was chosen. Raises UserError where transformers refuses it."""
    for model in of(prepared) if chosen is not None else ():
        try:
            model.set_attn_implementation(chosen.value)  # type: ignore[union-attr]
        except (ValueError, ImportError) as error:
            raise UserError(f"attention is {chosen.value}, and {first_line(error)}") from error  # type: ignore[union-attr]


def of(prepared: Prepared) -> Iterator[Any]:
    """The models of transformers in what is trained, and in further ones that its trainer gets (a reference)."""
    import torch
    from transformers import PreTrainedModel

    for each in (prepared.model, *prepared.trainer_settings.values()):
        if isinstance(each, torch.nn.Module):
            found = next((module for module in each.modules() if isinstance(module, PreTrainedModel)), None)
            if found is not None:
                yield found
