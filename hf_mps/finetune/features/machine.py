"""What a run asks of its machine: a precision, room in memory, one GPU of several, no sleep, no expected warnings."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.notices import ignoring
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan
from hf_mps.finetune.models.checkpoint import text_config
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.tasks import Prepared
from hf_mps.metal import fallback
from hf_mps.metal.device import machine, precision
from hf_mps.metal.fallback.accounting import MetalFallbackWarning

CAFFEINATE = "caffeinate"


class Precision(Feature):
    """float32 on Metal and on a CPU; on CUDA bfloat16 where the GPU computes it."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `precision`."""
        draft.choices["precision"], mixed = precision_of(draft.training, draft.device)
        draft.arguments |= mixed


def precision_of(training: Mapping[str, Any], device_type: str) -> tuple[Choice[str], dict[str, Any]]:
    """Choose fp32, bf16 or fp16, with the arguments for Trainer. Raises UserError for one that the device lacks."""
    chosen = [name for name in ("bf16", "fp16") if training.get(name)]
    if len(chosen) == 2:
        raise UserError("training.bf16 and training.fp16 are both true; give one of them")
    for name in ("bf16", "fp16"):
        if training.get(name) or training.get(f"{name}_full_eval"):
            try:
                found = precision.requested(name, device_type)
            except UserError as error:
                raise UserError(f"training.{name}: {error}; leave it out") from error
    if chosen:
        return Choice(chosen[0], found.reason), {}
    if "bf16" in training or "fp16" in training:
        return Choice("fp32", SAID), {}
    default = precision.default(device_type)
    return default, {default.value: True} if default.value != "fp32" else {}


class OneGpu(Feature):
    """The first, of several: Trainer's own way, DataParallel, would copy the model to all of them at every step and
    multiply the batch.
    """

    def decide(self, draft: Draft) -> None:
        """Choose the key `gpus`; nothing where there is one for each process."""
        import torch

        count = torch.cuda.device_count() if draft.device == "cuda" and World.here().alone else 1
        if count > 1:
            every = f"torchrun --nproc_per_node {count} -m hf_mps.finetune … trains on all"
            draft.choices["gpus"] = Choice(f"1 of {count}", f"the first, CUDA_VISIBLE_DEVICES names another; {every}")


class ExpectedFallback(Feature):
    """Operators that the recipe names in `fallback` run on the CPU without a warning."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `on_the_cpu`, on Metal alone, for those that have no kernel in the installed torch."""
        if draft.recipe.fallback and draft.device == "mps":
            registered = set(fallback.registered())
            if missing := [name for name in draft.recipe.fallback if name in registered]:
                reason = "they have no Metal kernel, and the recipe names them: no warning"
                draft.choices["on_the_cpu"] = Choice(", ".join(missing), reason)

    def around(self, trainer: Any, plan: Plan) -> AbstractContextManager[Any]:
        """Suppress their warnings."""
        return expected_operators(plan.recipe.fallback)


def expected_operators(operators: Sequence[str]) -> AbstractContextManager[None]:
    """Suppress the warnings of operators that the recipe names; the ledger counts them all the same."""
    names = "|".join(map(re.escape, operators))
    return ignoring(MetalFallbackWarning, f"hf_mps: ({names}) of ") if operators else nullcontext()


class NoSleep(Feature):
    """A Mac stays awake until the run ends: from its loading on, so the runner enters `awake` itself."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `sleep`, on a Mac alone."""
        if can_stay_awake():
            draft.choices["sleep"] = Choice("held off", f"{CAFFEINATE} -is, until the run ends")


def can_stay_awake() -> bool:
    """Return whether this is a Mac with macOS's program for it."""
    return machine.present().mac and shutil.which(CAFFEINATE) is not None


@contextmanager
def awake() -> Iterator[None]:
    """Keep the Mac awake while the context lasts; do nothing on another machine."""
    if not can_stay_awake():
        yield
        return
    # -i prevents idle sleep, -s any sleep on mains power, -w ends the program with this process (man caffeinate).
    quiet, words = subprocess.DEVNULL, [CAFFEINATE, "-is", "-w", str(os.getpid())]
    # In a new session: Ctrl-C in the terminal would end it before the run has saved.
    process = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


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
