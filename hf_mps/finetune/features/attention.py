"""Which attention a run's models compute with: their own, the recipe's word, or in blocks where memory needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.features.base import Draft, Feature, Plan
from hf_mps.finetune.models.checkpoint import text_config
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.tasks import Prepared
from hf_mps.layer.fused_step.attention import NAME

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
    """Return the attention of a recipe whose key `attention` is `word`, or None for the one that the models have.

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


KERNELS = "attention_kernels"
OWN, CUDNN = "PyTorch's own", "cuDNN's"
PLAN = 0.15
"""Seconds for the plans of one shape."""
FIRST = 1.5
"""Seconds for the first plans on a machine."""
MASKED, PLAIN = 12e-12, 2e-12
"""Seconds that cuDNN saves for each score of a layer's forward and backward, with a padding mask and without."""
HALVES = ("bf16", "fp16")
USERS = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""PyTorch's own switch: a user who has set it has chosen."""


class AttentionKernels(Feature):
    """On CUDA a run too short to repay the plans that cuDNN makes goes without its attention.

    PyTorch's `scaled_dot_product_attention` sends half types to cuDNN first on Hopper and newer (sdp_utils.cpp,
    check_prefer_cudnn_attention), and cuDNN makes a plan for each new shape, forward and backward
    (meta-pytorch/torchtune#1652, modelscope/FunASR#3704). On one H100 with torch 2.11 a plan takes 0.12 to 0.18 s, and
    the first of its kind on a machine 1.3 to 5.7 s, in which kernels are compiled. In return a layer's forward and
    backward take less time: for each million of scores (batch x heads x length x length, lengths 104 to 2,048) 10 to
    15 µs less than the memory-efficient kernels, which serve padding masks, and 1 to 3 µs less than flash kernels,
    which serve the rest.
    """

    def try_out(self, plan: Plan, prepared: Prepared, checkpoint: Path | None) -> None:
        """Choose the key `attention_kernels`, where there is a choice."""
        if (found := choose_kernels(plan, prepared, plan.recipe)) is not None:
            plan.choices[KERNELS] = found

    def around(self, trainer: Any, plan: Plan) -> AbstractContextManager[Any]:
        """Leave cuDNN's out where it was decided."""
        return with_kernels(plan.choices.get(KERNELS))


def choose_kernels(plan: Plan, prepared: Prepared, recipe: Recipe) -> Choice[str] | None:
    """Choose the kernels of a run's attention; None where there is no choice.

    That is on other devices, without halves, with another attention than PyTorch's, and where the user chose.
    """
    if plan.device.value != "cuda" or not recipe.optimizations or plan.choices["precision"].value not in HALVES:
        return None
    import torch

    backends: Any = torch.backends.cuda
    # On Hopper and newer PyTorch takes cuDNN's kernels first.
    first = backends.cudnn_sdp_enabled() and torch.cuda.get_device_capability()[0] >= 9
    if USERS in os.environ or not first or recipe.attention not in ("auto", "sdpa"):
        return None
    lengths = _lengths(plan, prepared)
    layers = _number(prepared.model, "num_hidden_layers")
    heads = _number(prepared.model, "num_attention_heads")
    if not lengths or not layers or not heads:
        return None
    batches = plan.choices["steps"].value * plan.arguments.get("gradient_accumulation_steps", 1)
    squares = sum(length * length for length in lengths) / len(lengths)
    scores = batches * layers * plan.choices["batch"].value * heads * squares
    masked = len(set(prepared.token_counts or ())) > 1
    saved, shapes = scores * (MASKED if masked else PLAIN), len(set(lengths))
    cost = FIRST + shapes * PLAN
    plans = f"plans of {shapes} shape{'s' * (shapes != 1)}"
    if saved < cost:
        return Choice(OWN, f"cuDNN's would save {saved:.1f} s of the run, and their {plans} take {cost:.1f}")
    return Choice(CUDNN, f"they save {saved:.0f} s of the run, and their {plans} take {cost:.1f}")


@contextmanager
def with_kernels(choice: Choice[str] | None) -> Iterator[None]:
    """Leave cuDNN's attention out inside, where `choice` says so."""
    import torch

    backends: Any = torch.backends.cuda
    if choice is None or choice.value != OWN or not backends.cudnn_sdp_enabled():
        yield
        return
    backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(True)


def _lengths(plan: Plan, prepared: Prepared) -> list[int]:
    """Return the padded length of each training row in tokens, or that of all images in patches; none if unknown."""
    counts, lengths = prepared.token_counts, plan.choices.get("lengths")
    if counts:
        target = getattr(lengths.value, "target", int) if lengths is not None else int
        return [target(count) for count in counts]
    image, patch = _number(prepared.model, "image_size"), _number(prepared.model, "patch_size")
    return [(image // patch) ** 2 + 1] if image and patch else []


def _number(model: Any, name: str) -> int:
    """Return a number of the model's configuration, 0 where it has none of that name."""
    found = getattr(text_config(model), name, 0)
    return found if isinstance(found, int) else 0
