"""A memory plan: does a training fit a machine, what other settings would make it fit, and the report of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.files import plain
from hf_mps.core.text import GIB, MIB, counted
from hf_mps.finetune.features import early_steps
from hf_mps.finetune.models import quantization
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.recipe.overrides import of_values
from hf_mps.metal.device.memory import beside_live
from hf_mps.metal.operators.launch_class import CLASSES
from hf_mps.tools.dryrun import prepare
from hf_mps.tools.dryrun.launches import Launches, launch_lines
from hf_mps.tools.dryrun.memory.machine import Machine
from hf_mps.tools.dryrun.memory.trace import PARTS, STATE, WEIGHTS, Estimate, Tracer
from hf_mps.tools.dryrun.render import Report
from hf_mps.tools.dryrun.resolve import Target
from hf_mps.tools.dryrun.step import model_errors

CHECKPOINTING = {f"training.{training_section.checkpointing()}": True}
EARLY: dict[str, Any] = {early_steps.KEY: True}
BF16 = {"training.bf16": True}
ADAFACTOR: dict[str, Any] = {"training.optim": "adafactor"}
HALVES: dict[str, Any] = {early_steps.WEIGHTS: early_steps.HALVES}
LORA: dict[str, Any] = {"lora": {}}
QUANTIZED: dict[str, Any] = {quantization.KEY: quantization.NF4}
IN_4_BITS = "adapters over frozen weights in 4 bits, the rest in bfloat16, and the forward pass runs twice"
# From the least change to the greatest. What each costs: accumulation and checkpointing give the same gradients (but
# for dropout's draws); checkpointing runs each forward pass twice; another optimizer and weights in halves take other
# steps; adapters train other weights than the recipe says. State on the CPU is none: it is the same memory on a Mac.
WAYS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "the same gradients, in smaller pieces"),
    (CHECKPOINTING, "the same gradients; the forward pass runs twice, so a step takes about a third longer"),
    (BF16, "matrix products and what they keep in half precision; weights stay float32"),
    (CHECKPOINTING | BF16, "both: the forward pass runs twice, in half precision"),
    (
        ADAFACTOR | EARLY | CHECKPOINTING,
        "another optimizer, which keeps sums of rows and columns in place of two moments; other losses than AdamW's",
    ),
    (HALVES | CHECKPOINTING, f"{early_steps.ROUNDED}; the forward pass in bfloat16"),
    (LORA, "adapters train in place of all weights: no gradients and moments for the others"),
    (LORA | CHECKPOINTING, "adapters train in place of all weights, and the forward pass runs twice"),
    (LORA | CHECKPOINTING | BF16, "adapters, a forward pass that runs twice, in half precision"),
    (
        LORA | CHECKPOINTING | HALVES,
        "adapters in float32 over frozen weights in bfloat16, and the forward pass runs twice",
    ),
    (QUANTIZED | CHECKPOINTING | HALVES, IN_4_BITS),
    (LORA | QUANTIZED | CHECKPOINTING | HALVES, IN_4_BITS),
)


@dataclass(frozen=True)
class Option:
    """Overrides, as a command line has them, that make the step fit: `estimate` with them, `largest` batch in rows."""

    overrides: tuple[str, ...]
    reason: str
    estimate: Estimate
    largest: int


@dataclass(frozen=True)
class MemoryPlan:
    """Whether the step of `estimate` fits `machine`; `largest` is the most rows that do, `options` make it fit.

    `launches` is what one such step launches, or why that is not known.
    """

    target: str
    machine: Machine
    estimate: Estimate
    largest: int
    options: tuple[Option, ...] = ()
    facts: Mapping[str, Choice[Any]] = field(default_factory=dict)
    launches: Launches | Choice[None] | None = None

    @property
    def verdict(self) -> str:
        """fits, swaps or "does not fit"."""
        return self.machine.verdict(self.estimate.bytes)


def ranked(
    target: Target, machine: Machine, device: Choice[str], length: int | None, made: Mapping[str, Any], tracer: Tracer
) -> Iterator[Option]:
    """Every way that makes the step fit, the least change first; a way that the recipe goes already is left out.

    The run goes a part of the way itself: `made` are those overrides, which `target` has, and `tracer` is of its step.

    Each keeps the number of rows in an optimizer step, with accumulation where it must, which a step in the backward
    pass cannot have.
    """
    tried: list[dict[str, Any]] = []
    estimate = tracer()
    for whole, reason in WAYS:
        changes = {key: value for key, value in whole.items() if key not in made}
        if changes in tried or not changes_something(target, changes):
            continue
        tried.append(changes)
        if least(changes, estimate) > machine.comfortable:
            continue
        if EARLY.keys() <= made.keys() and not _steps_early(whole):
            changes = changes | {early_steps.KEY: False}
        try:
            if changes:
                varied = target.varied(changes)
                with model_errors(varied.resolved), prepare.weightless(varied) as parts:
                    trained = estimate.trained if changes.keys().isdisjoint(LORA | QUANTIZED) else ()
                    option = _option(Tracer(parts, device, length, trained=trained), machine, changes, reason)
            else:
                option = _option(tracer, machine, changes, reason)
        except UserError:  # no such layers, no such precision, a model that cannot checkpoint
            continue
        if option is not None:
            yield option


def least(changes: Mapping[str, Any], estimate: Estimate) -> int:
    """Return bytes that a step with them needs at least, without a trace: what is kept from step to step."""
    if changes.keys() & QUANTIZED:
        return 0
    kept = estimate.parts.get(WEIGHTS, 0)
    if changes.keys() & HALVES:
        return kept // 2
    return kept if changes.keys() & (LORA | ADAFACTOR | EARLY) else kept + estimate.parts.get(STATE, 0)


def _option(tracer: Tracer, machine: Machine, changes: dict[str, Any], reason: str) -> Option | None:
    asked = tracer.rows
    if _steps_early(changes) and tracer().bytes > machine.comfortable:
        return None
    if (most := tracer.largest(machine.comfortable)) == 0:
        return None
    if most >= asked:
        return Option(words(changes), reason, tracer(), most)
    rows = max(number for number in range(1, most + 1) if asked % number == 0)
    smaller = {
        "training.per_device_train_batch_size": rows,
        "training.gradient_accumulation_steps": tracer.accumulation * (asked // rows),
    }
    return Option(words(changes | smaller), reason, tracer(rows), most)


def _steps_early(changes: Mapping[str, Any]) -> bool:
    """Return whether a step with them cannot accumulate."""
    return any(changes.get(key) for key in EARLY | HALVES) and (LORA | QUANTIZED).keys().isdisjoint(changes)


def words(changes: dict[str, Any]) -> tuple[str, ...]:
    """Return overrides as a person writes them."""
    made = of_values(changes).items()
    return tuple(f"{key}={one.value}" if isinstance(one.value, str) else one.word for key, one in made)


def changes_something(target: Target, changes: Mapping[str, Any]) -> bool:
    """Whether each of the changes is one, the user's own words say nothing of it, and the recipe's task knows it."""
    recipe, training = target.resolved.recipe, target.resolved.recipe.training
    lora, rounded = getattr(recipe, "lora", None), getattr(recipe, quantization.KEY, quantization.NF4)
    has_it = {
        **dict.fromkeys(CHECKPOINTING, training.get(training_section.checkpointing())),
        "attention": recipe.attention != "auto",
        "training.optim": training.get("optim"),
        early_steps.KEY: recipe.step_in_backward is not None,
        early_steps.WEIGHTS: recipe.weights == early_steps.HALVES,
        "training.bf16": training.get("bf16") or training.get("fp16"),
        # Quantized already, a task that has no such weights, or whole weights, which could not step once rounded.
        quantization.KEY: rounded is not None or ("lora" not in changes and lora is None),
        "lora": "lora" not in type(recipe).model_fields or lora is not None,
    }
    return not changes.keys() & target.resolved.overrides.keys() and not any(has_it.get(key) for key in changes)


def report(plan: MemoryPlan) -> Report:
    """The peak with its parts, what the machine has, the largest batch, and what would make it fit; sizes in bytes."""
    machine, estimate = plan.machine, plan.estimate
    several = f"{estimate.accumulation} of them make" if estimate.accumulation > 1 else ""
    limits = f"{gib(machine.recommended)} recommended for one process, {gib(machine.memory)} in all"
    return Report(
        "plan",
        plan.target,
        plan.facts,
        list(_lines(plan)),
        {
            "machine": {**plain(machine), "comfortable": machine.comfortable},
            "verdict": plan.verdict,
            "estimate": _values(estimate),
            "largest_batch": plan.largest,
            "options": [
                {"overrides": one.overrides, "reason": one.reason, "largest_batch": one.largest}
                | {"estimate": _values(one.estimate)}
                for one in plan.options
            ],
            "launches": plan.launches.values() if isinstance(plan.launches, Launches) else plan.launches,
        },
        table_facts={
            "batch": Choice(_shape(estimate, estimate.rows), f"{several} an optimizer step".strip()),
            "machine": Choice(machine.name, f"{limits}; above {gib(machine.comfortable)} {machine.beyond}"),
        },
        names=(*PARTS, *CLASSES),
        problem="" if plan.verdict == "fits" else f"{gib(estimate.bytes)} {plan.verdict} on {machine.name}",
    )


def _lines(plan: MemoryPlan) -> Iterator[str | tuple[str, ...]]:
    estimate, share = plan.estimate, plan.estimate.bytes / plan.machine.comfortable
    peak = f"peak {gib(estimate.bytes)} of live memory, {plan.verdict}"
    yield from ("", f"{peak}: {share:.0%} of what may be used; at {estimate.where}")
    kept = {part: size for part, size in estimate.parts.items() if size}
    yield from ((part, f"{gib(kept[part]):>9}", what) for part, what in PARTS.items() if part in kept)
    release = plan.launches.release if isinstance(plan.launches, Launches) else str(torch.__version__)
    more = "Python and PyTorch hold some hundred megabytes more"
    yield f"  live memory, of tensors alone: {beside_live(release)}; {more}"
    most = _shape(estimate, plan.largest) if plan.largest else "none: one row alone is too much"
    yield from ("", f"largest batch that fits: {most}")
    if plan.options:
        yield from ("", "what would make it fit, the least change first:")
    for number, option in enumerate(plan.options, 1):
        yield f"  {number}. {' '.join(option.overrides)}"
        yield f"     peak {gib(option.estimate.bytes)}; {option.reason}; up to {counted(option.largest, 'row')}"
    if plan.launches is not None:
        yield from launch_lines(plan.launches)


def gib(size: int) -> str:
    """Return bytes for a person."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / MIB:.2f} MiB"


def _shape(estimate: Estimate, rows: int) -> str:
    return f"{counted(rows, 'row')} {estimate.width}".rstrip()


def _values(estimate: Estimate) -> dict[str, Any]:
    return {name: getattr(estimate, name) for name in ("rows", "length", "accumulation", "bytes", "parts", "where")}
