"""What would make a training fit: other settings of the same recipe, each traced, the least change first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.dryrun.memory.machine import Machine
from hf_mps.dryrun.memory.tracer import Estimate, Tracer, largest
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.recipe.overrides import of_values

if TYPE_CHECKING:
    from hf_mps.dryrun.resolve import Target

CHECKPOINTING = {f"training.{training_section.checkpointing()}": True}
BF16 = {"training.bf16": True}
LORA: dict[str, Any] = {"lora": {}}
# From the least change to the greatest. What each costs: accumulation and checkpointing give the same gradients (but
# for dropout's draws); checkpointing runs each forward pass twice; adapters train other weights than the recipe says.
WAYS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "the same gradients, in smaller pieces"),
    (CHECKPOINTING, "the same gradients; the forward pass runs twice, so a step takes about a third longer"),
    (BF16, "matrix products and what they keep in half precision; weights stay float32"),
    (CHECKPOINTING | BF16, "both: the forward pass runs twice, in half precision"),
    (LORA, "adapters train in place of all weights: no gradients and moments for the others"),
    (LORA | CHECKPOINTING, "adapters train in place of all weights, and the forward pass runs twice"),
    (LORA | CHECKPOINTING | BF16, "adapters, a forward pass that runs twice, in half precision"),
)


@dataclass(frozen=True)
class Option:
    """Overrides, as a command line has them, that make the step fit: `estimate` with them, `largest` batch in rows."""

    overrides: tuple[str, ...]
    reason: str
    estimate: Estimate
    largest: int


def ranked(target: Target, machine: Machine, device: Choice[str], length: int | None) -> Iterator[Option]:
    """Every way that makes the step fit, the least change first; a way that the recipe goes already is left out.

    Each keeps the number of rows in an optimizer step, with accumulation where it must.
    """
    from hf_mps.dryrun import prepare

    for changes, reason in WAYS:
        if not _new(target, changes):
            continue
        try:
            with prepare.weightless(target.varied(changes)) as parts:
                found = _option(Tracer(parts, device, length), machine, changes, reason)
        except UserError:  # the model has no such layers, the chip no such precision
            continue
        if found is not None:
            yield found


def _option(tracer: Tracer, machine: Machine, changes: dict[str, Any], reason: str) -> Option | None:
    asked, limit = tracer.rows, machine.comfortable
    most = largest(lambda rows: tracer(rows).bytes, limit, asked)
    if most == 0:
        return None
    if most >= asked:
        return Option(_words(changes), reason, tracer(asked), most)
    rows = max(number for number in range(1, most + 1) if asked % number == 0)
    smaller = {
        "training.per_device_train_batch_size": rows,
        "training.gradient_accumulation_steps": tracer.accumulation * (asked // rows),
    }
    return Option(_words(changes | smaller), reason, tracer(rows), most)


def _words(changes: dict[str, Any]) -> tuple[str, ...]:
    return tuple(override.word for override in of_values(changes).values())


def _new(target: Target, changes: dict[str, Any]) -> bool:
    """Whether each of the changes is one, the user's own words say nothing of it, and the recipe's task knows it."""
    recipe, training = target.resolved.recipe, target.resolved.recipe.training
    if changes.keys() & target.resolved.overrides.keys():
        return False
    if CHECKPOINTING.keys() <= changes.keys() and training.get(training_section.checkpointing()):
        return False
    if "training.bf16" in changes and (training.get("bf16") or training.get("fp16")):
        return False
    return "lora" not in changes or ("lora" in type(recipe).model_fields and getattr(recipe, "lora", None) is None)
