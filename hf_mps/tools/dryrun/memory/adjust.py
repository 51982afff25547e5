"""What a run changes so that its step fits the machine: attention in blocks, checkpointing, steps in the backward pass.

These give the same gradients, to rounding and dropout's draws. What changes more (smaller pieces, another optimizer,
half precision, adapters) is the user's to choose: `fit.WAYS`; where a run needs one, it says which.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from hf_mps.core import status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.features import early_steps
from hf_mps.finetune.features.machine import MemoryAdjustments, at_most
from hf_mps.finetune.run.stages import PreparedRun
from hf_mps.layer.fused_step.attention import NAME
from hf_mps.tools.dryrun import metal_device, prepare
from hf_mps.tools.dryrun.memory import fit
from hf_mps.tools.dryrun.memory.fit import ADAFACTOR, CHECKPOINTING, EARLY, HALVES, LORA, changes_something, gib
from hf_mps.tools.dryrun.memory.machine import Machine, present
from hf_mps.tools.dryrun.memory.trace import Estimate, Tracer
from hf_mps.tools.dryrun.resolve import Target
from hf_mps.tools.dryrun.step import model_errors

ATTENTION: dict[str, Any] = {"attention": NAME}
# From the least change to the greatest: blocks cost one product of attention more, checkpointing a whole forward pass,
# an early step a forward and a backward pass, where gradients are clipped.
# The first combination of all, which changes nothing, is left out.
STEPS = tuple(
    early | layers | scores for early in ({}, EARLY) for layers in ({}, CHECKPOINTING) for scores in ({}, ATTENTION)
)[1:]
WORDS = {
    "attention": "attention in blocks keeps no scores, and computes them once more",
    "checkpointing": "layers keep their input alone; the forward pass runs twice, so a step takes about a third longer",
}
REFUSED_BY = {
    "attention": "attention=sdpa",
    "checkpointing": f"{next(iter(CHECKPOINTING))}=false",
    early_steps.KEY: f"{early_steps.KEY}=false",
}
# What the user may choose where that is not enough; the first one that fits is named.
FURTHER = (ADAFACTOR, HALVES, LORA)
MEMORY, PLAN = "memory", "hf-mps plan"
WORTH = 0.9
"""Of what a step needed: where even the smallest is no smaller than that, nothing is changed."""


def estimate_fit(run: PreparedRun) -> MemoryAdjustments:
    """The room that a run makes itself before it trains; most are small beside the machine, and nothing is traced.

    A step that cannot be traced is left as it is.
    """
    if run.device.value != "mps":
        return MemoryAdjustments()
    size, machine = at_most(run.prepared, run.resolved.recipe), present()
    may_use = f"{machine.name} may use {gib(machine.comfortable)}"
    if size is None:
        return MemoryAdjustments()
    if size <= machine.comfortable:
        told = Choice(f"below {gib(size)}", f"a step, from the sizes of weights and rows; {may_use}")
        return MemoryAdjustments(choices={MEMORY: told})
    status.now("tracing a training step: does it fit this machine? …")
    try:
        target, device = Target(run.resolved.name, run.resolved), metal_device()
        made = make(target, machine, device)
        if machine.verdict(made.bytes) == "fits":
            told = Choice(f"{gib(made.bytes)} live at peak", f"estimated from a traced step; {may_use}")
            return replace(made, choices=made.choices | {MEMORY: told})
        return replace(made, choices=made.choices | proposed(target, machine, device, made))
    except Exception:  # whatever a step does that a trace cannot follow: it trains as it is
        return MemoryAdjustments()


def make(
    target: Target,
    machine: Machine,
    device: Choice[str],
    length: int | None = None,
    before: Estimate | None = None,
    checkpointed: Callable[[], Estimate | None] | None = None,
) -> MemoryAdjustments:
    """Return what makes the step of `target` fit `machine`, the least change first; nothing where it fits as it is.

    Where nothing makes it fit, what needs least, if that is less by a tenth. `before` is the estimate as it is, where
    that is known, and `checkpointed` makes the one with checkpointing alone for a caller that keeps it, or returns None
    where it does not fit. Raises as `Tracer` does.
    """
    before = before or _estimate(target, device, length)
    if machine.verdict(before.bytes) == "fits":
        return MemoryAdjustments(bytes=before.bytes)
    best: tuple[int, dict[str, Any]] = (int(WORTH * before.bytes), {})
    steps = [each for each in STEPS if all(changes_something(target, {key: each[key]}) for key in each)]
    # Where weights and moments alone are too much, gradients have to go.
    # Then no other change can be enough, and their traces are saved.
    early = [each for each in steps if EARLY.keys() <= each.keys()]
    for further in early if early and fit.least({}, before) > machine.comfortable else steps:
        if further in early and before.accumulation > 1:  # whose gradients all have to stay
            continue
        try:
            kept = checkpointed() if checkpointed and further == CHECKPOINTING else None
            size = (kept or _estimate(target.varied(further), device, length, before.trained)).bytes
        except UserError:  # the model has no such attention, no such layers, or cannot checkpoint
            continue
        if size < best[0]:
            best = (size, further)
        if machine.verdict(size) == "fits":
            break
    if not best[1]:
        return MemoryAdjustments(bytes=before.bytes)
    size, changes = best
    told = f"{gib(before.bytes)} of a step {machine.verdict(before.bytes)} on {machine.name}"
    told += f", {gib(size)} {machine.verdict(size)}" + ("", " with both", " with all three")[len(changes) - 1]
    words = WORDS | {early_steps.KEY: early_steps.words(target.resolved.recipe.training)}
    choices: dict[str, Choice[Any]] = {}
    for key, value in changes.items():
        name = key if key in words else "checkpointing"
        choices[name] = Choice(value, f"{told}: {words[name]}; to refuse it: {REFUSED_BY[name]}")
    return MemoryAdjustments(changes, choices, size)


def proposed(target: Target, machine: Machine, device: Choice[str], made: MemoryAdjustments) -> dict[str, Choice[Any]]:
    """Return what the user could choose where `made` is not enough, in one line: what fits, or else needs least."""
    if machine.verdict(made.bytes) == "fits":
        return {}
    found: list[tuple[int, dict[str, Any]]] = []
    for further in FURTHER:
        if not changes_something(target, further):
            continue
        changes = dict(made.overrides) | further
        if further is LORA:
            changes.pop(early_steps.KEY, None)
        try:
            found.append((_estimate(target.varied(changes), device, None).bytes, further))
        except UserError:
            continue
        if machine.verdict(found[-1][0]) == "fits":
            break
    reason = f"{gib(made.bytes)} of a step" + (", even so" if made.overrides else "")
    if found:
        least, further = min(found, key=lambda each: each[0])
        words, verdict = " ".join(fit.words(further)), machine.verdict(least)
        reason += f"; {words} would need {gib(least)}, which {verdict}, and trains to other numbers"
    return {MEMORY: Choice(machine.verdict(made.bytes), f"{reason}; next: {PLAN} {target.name}")}


def _estimate(target: Target, device: Choice[str], length: int | None, trained: Collection[str] = ()) -> Estimate:
    with model_errors(target.resolved), prepare.weightless(target) as parts:
        return Tracer(parts, device, length, trained=trained)()
