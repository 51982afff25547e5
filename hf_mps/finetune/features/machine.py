"""What a run asks of its machine: a precision, one GPU of several, no sleep, no warnings that its recipe expects."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.notices import ignoring
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan
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
        """Choose the key `on_the_cpu`, on Metal alone."""
        if draft.recipe.fallback and draft.device == "mps":
            reason = "they have no Metal kernel, and the recipe names them: no warning"
            draft.choices["on_the_cpu"] = Choice(", ".join(draft.recipe.fallback), reason)

    def around(self, trainer: Any, plan: Plan) -> AbstractContextManager[Any]:
        """Suppress their warnings."""
        return expected_operators(plan.recipe.fallback)


@contextmanager
def expected_operators(operators: Sequence[str]) -> Iterator[None]:
    """Suppress the warnings of operators that the recipe names; the ledger counts them all the same."""
    with ExitStack() as ignored:
        for operator in operators:
            ignored.enter_context(ignoring(MetalFallbackWarning, re.escape(f"hf_mps: {operator} of ")))
        yield


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
