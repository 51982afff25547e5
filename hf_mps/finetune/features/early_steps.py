"""Runs whose weights step in the backward pass or are stored in bfloat16: when that works, and how Trainer does it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan, value_of
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.run.trainer import StepMethod
from hf_mps.finetune.tasks import Prepared
from hf_mps.metal.device import precision

KEY, WEIGHTS, HALVES = "step_in_backward", "weights", "bfloat16"
# PyTorch's own optimizers and transformers' Adafactor, whose step of a weight looks at that weight alone.
PLAIN = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
ON, OFF = "on", "off"
WHAT = "each weight steps when its gradient is there, which is then let go"
CLIPS = "clipping needs the norm of all gradients first, so forward and backward pass run twice"
TWICE = f"{WHAT}; {CLIPS} (training.max_grad_norm=0 saves that)"
ROUNDED = "weights, gradients and moments take half; a step is rounded up or down by chance, so that small ones count"


class EarlySteps(Feature):
    """`step_in_backward` and `weights` of a recipe."""

    def decide(self, draft: Draft) -> None:
        """Choose these two keys, where there is something to say."""
        needed = draft.adjustments.choices.get(KEY)
        draft.choices |= choose(draft.recipe, draft.training, draft.prepared, draft.device, needed)

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Let the trainer's weights step in the backward pass."""
        if value_of(plan.choices, KEY) == ON:
            trainer.step_method = StepsInBackward(trainer)


def choose(
    recipe: Recipe, training: Mapping[str, Any], prepared: Prepared, device: str, needed: Choice[bool] | None = None
) -> dict[str, Choice[Any]]:
    """Return the choices for `step_in_backward` and `weights`; `needed` is what the machine's memory asks for.

    Nothing where there is nothing to say. Raises UserError where the recipe asks for what the run cannot have.
    """
    found: dict[str, Choice[Any]] = {}
    asked = recipe.step_in_backward
    halves = recipe.weights == HALVES
    # Adapters over frozen weights stay float32.
    rounds = halves and any(each.requires_grad and each.dtype.itemsize == 2 for each in prepared.model.parameters())
    if halves:
        _refuse_halves(training, device, asked, rounds)
        kept = "frozen weights take half the memory, adapters stay float32"
        found[WEIGHTS] = Choice(HALVES, f"{SAID}: {ROUNDED if rounds else kept}")
    if asked is False:
        return found | {KEY: Choice(OFF, SAID)}
    if not (asked or rounds or needed is not None):
        return found
    if why := obstacle(training, prepared.trainer):
        word = f"{KEY} is true" if asked else f"{WEIGHTS} is {HALVES}, whose weights step in the backward pass"
        raise UserError(f"{word}, and {why}; leave one of them out")
    if not asked and needed is not None and not rounds:
        return found | {KEY: Choice(ON, needed.reason)}
    return found | {KEY: Choice(ON, f"{SAID if asked else f'{WEIGHTS} are {HALVES}'}: {words(training)}")}


def words(training: Mapping[str, Any]) -> str:
    """Return what it means for a run with these arguments."""
    return TWICE if _clips(training) else WHAT


def obstacle(training: Mapping[str, Any], kind: Any) -> str:
    """Return why a trainer of the class `kind` (None: Trainer) cannot step early, as a clause; empty where it can."""
    from transformers import Trainer

    if not World.here().alone:
        return "ranks average the gradients before any weight steps"
    if (training.get("gradient_accumulation_steps") or 1) > 1:
        return "training.gradient_accumulation_steps adds gradients up, which then all have to stay"
    if training.get("fp16"):
        return "training.fp16 looks for overflows in all gradients before any weight steps"
    if str(training.get("optim", PLAIN[0])) not in PLAIN:
        return f"training.optim={training['optim']} is none of {', '.join(PLAIN)}"
    kind = kind or Trainer
    for method in ("training_step", *(("compute_loss",) if _clips(training) else ())):
        if getattr(kind, method) is not getattr(Trainer, method):
            once = " (training.max_grad_norm=0 needs it once)" if method == "compute_loss" else ""
            return f"{kind.__name__} defines its own {method}, which may do more than can be done twice{once}"
    return ""


class StepsInBackward(StepMethod):
    """Steps whose weights have changed when the backward pass ends; the trainer is told the norm of their gradients."""

    def __init__(self, trainer: Any) -> None:
        from hf_mps.layer.fused_step.in_backward import InBackward

        self._trainer = trainer
        self._norm: Any = None
        self._steps, self._attached = InBackward(), False

    def clip_grad_norm(self, stock: Callable[..., Any], model: Any) -> Any:
        """Return the norm of gradients that were clipped and are gone."""
        return self._norm

    def grad_norm(self, stock: Callable[..., Any], model: Any, norm: Any) -> Any:
        """Return the same norm."""
        return self._norm

    def training_step(self, stock: Callable[..., Any], model: Any, inputs: Any, items: Any) -> Any:
        """Return the loss of a step whose weights have stepped; the optimizer finds no gradient after it."""
        if not self._attached:
            self._steps.attach(model.parameters())
            self._attached = True
        from torch.nn.utils import clip_grads_with_norm_

        optimizer, limit, settle = self._trainer.optimizer, self._trainer.args.max_grad_norm, None
        if limit is not None and limit > 0:
            # Clipping scales by the norm of all gradients, and the first weight steps before the last gradient is
            # there: one pass measures, and a second one, with the same draws, steps.
            self._steps.begin(optimizer, measuring=True)
            with undone(model):
                stock(model, inputs, items)
            self._norm = norm = self._steps.norm()
            settle = lambda weight: clip_grads_with_norm_([weight], limit, norm)  # noqa: E731
        self._steps.begin(optimizer, measuring=False, settle=settle)
        loss = stock(model, inputs, items)
        if settle is None:
            self._norm = self._steps.norm()
        return loss


@contextmanager
def undone(model: Any) -> Iterator[None]:
    """A pass that leaves nothing behind: random states and the statistics of batch norm are put back."""
    import numpy
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    device = next(model.parameters()).device.type
    drawn = [torch, *([getattr(torch, device)] if device not in ("cpu", "meta") else [])]
    python, array = random.getstate(), numpy.random.get_state()
    with _disable_current_modes():  # in a trace of fake tensors a state is a real one
        states = [each.get_rng_state() for each in drawn]
    # Batch norms of every kind count what they see, and a forward pass that is done twice would count twice.
    norms = (module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm))
    kept = [(buffer, buffer.clone()) for module in norms for buffer in module.buffers()]
    yield
    random.setstate(python)
    numpy.random.set_state(array)
    with _disable_current_modes():
        for each, state in zip(drawn, states, strict=True):
            each.set_rng_state(state)
    for buffer, before in kept:
        buffer.copy_(before)


def _clips(training: Mapping[str, Any]) -> bool:
    limit = training.get("max_grad_norm", 1.0)
    return limit is not None and limit > 0


def _refuse_halves(training: Mapping[str, Any], device: str, asked: bool | None, rounds: bool) -> None:
    """Raise UserError for what does not go with weights in bfloat16."""
    try:
        precision.requested("bf16", device)
    except UserError as error:
        raise UserError(f"{WEIGHTS} is {HALVES}: {error}; leave it out") from error
    if training.get("fp16"):
        raise UserError(f"{WEIGHTS} is {HALVES}, and training.fp16 is another half; leave one of them out")
    if rounds and asked is False:
        raise UserError(f"{WEIGHTS} is {HALVES}, whose weights step in the backward pass; leave {KEY} out")
    if rounds and str(training.get("optim", "")) == "adafactor":
        raise UserError(f"{WEIGHTS} is {HALVES}, of which adafactor cannot step a part; leave one of them out")
