"""Room in the machine's memory: what a run changes so that its steps fit, and whether that is worth a look at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.features.base import Draft, Feature
from hf_mps.finetune.models.checkpoint import text_config
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.tasks._base import Prepared

TRAINING = "training."


@dataclass(frozen=True)
class MemoryAdjustments:
    """Keys of a recipe that are laid over it so that its steps fit, and the choices that say so; most runs need none.

    None of them is a key that the user gave a value. `bytes` is what a step then takes, 0 where that is not known.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    bytes: int = 0

    @property
    def training(self) -> dict[str, Any]:
        """Those of the recipe's `training` section."""
        return {key.removeprefix(TRAINING): value for key, value in self.overrides.items() if key.startswith(TRAINING)}


class MemoryFit(Feature):
    """What a step needs to fit the machine's memory, as `hf_mps.tools.dryrun.memory.adjust` finds out.

    Its training arguments are the draft's from the beginning.
    """

    def decide(self, draft: Draft) -> None:
        """Add the choices that say so."""
        draft.choices |= draft.adjustments.choices


def at_most(prepared: Prepared, recipe: Recipe) -> int | None:
    """Return bytes that a training step surely stays below, from sizes alone; None where rows have no number of tokens.

    Weights, gradients and two moments in float32; of every layer's activations its input and three tensors of its
    output's size, of attention four tensors of scores, of a vocabulary's logits four.
    """
    lengths = prepared.choices.get("lengths")
    longest: Any = getattr(lengths.value, "longest", None) if lengths is not None else None
    if prepared.token_counts is None or not isinstance(longest, int):
        return None
    settings = prepared.arguments_defaults | dict(recipe.training)
    tokens = longest * int(settings.get("per_device_train_batch_size") or DEFAULT_BATCH)
    model, config = prepared.model, text_config(prepared.model)
    held = sum(p.numel() * (20 if p.requires_grad else 4 if p.is_floating_point() else 1) for p in model.parameters())
    # Of all layers; an encoder's and a decoder's, which attends twice.
    heads, layers = (getattr(config, name, None) or 16 for name in ("num_attention_heads", "num_hidden_layers"))
    attentions = int(heads * layers * (3 if getattr(config, "is_encoder_decoder", False) else 1))
    return int(held) + 4 * tokens * (_widths(model) + 4 * longest * attentions)


def _widths(model: Any) -> int:
    """Numbers for each token that layers make and keep, over all of them."""
    import torch

    sizes = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor):  # a parametrized layer's is a list of modules
            continue
        if not weight.is_floating_point():  # quantized, and in its own shape
            sizes += 3 * (module.in_features + module.out_features)
        elif weight.dim() == 2:  # of GPT-2's layers the first size is the input's
            sizes += sum(weight.shape) + 2 * max(weight.shape)
        elif weight.dim() == 1:
            sizes += 3 * weight.shape[0]
    return sizes
