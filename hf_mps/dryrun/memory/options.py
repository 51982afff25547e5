"""What would make a training fit: other settings of the same recipe, each traced, the least change first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.dryrun.memory.machine import Machine
from hf_mps.dryrun.memory.tracer import Estimate, Tracer, largest
from hf_mps.finetune.recipe import training_section

if TYPE_CHECKING:
    from hf_mps.dryrun.resolve import Target

CHECKPOINTING = f"training.{training_section.checkpointing()}=true"
BF16 = "training.bf16=true"
LORA = "lora={}"
# From the least change to the greatest. What each costs: accumulation and checkpointing give the same gradients (but
# for dropout's draws); checkpointing runs each forward pass twice; adapters train other weights than the recipe says.
WAYS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "the same gradients, in smaller pieces"),
    ((CHECKPOINTING,), "the same gradients; the forward pass runs twice, so a step takes about a third longer"),
    ((BF16,), "matrix products and what they keep in half precision; weights stay float32"),
    ((CHECKPOINTING, BF16), "both: the forward pass runs twice, in half precision"),
    ((LORA,), "adapters train in place of all weights: no gradients and moments for the others"),
    ((LORA, CHECKPOINTING), "adapters train in place of all weights, and the forward pass runs twice"),
    ((LORA, CHECKPOINTING, BF16), "adapters, a forward pass that runs twice, in half precision"),
)


@dataclass(frozen=True)
class Option:
    """Overrides that make the recipe's optimizer step fit: `estimate` with them, `largest` batch in rows."""

    overrides: tuple[str, ...]
    reason: str
    estimate: Estimate
    largest: int


def ranked(target: Target, machine: Machine, device: Choice[str], length: int | None) -> Iterator[Option]:
    """Every way that makes the step fit, the least change first; a way that the recipe goes already is left out.

    Each keeps the number of rows in an optimizer step, with accumulation where it must.
    """
    from hf_mps.dryrun import prepare
    from hf_mps.dryrun.resolve import varied

    for overrides, reason in WAYS:
        if not _new(target, overrides):
            continue
        try:
            with prepare.weightless(varied(target, overrides)) as parts:
                found = _option(Tracer(parts, device, length), machine, overrides, reason)
        except UserError:  # the model has no such layers, the chip no such precision
            continue
        if found is not None:
            yield found


def _option(tracer: Tracer, machine: Machine, overrides: tuple[str, ...], reason: str) -> Option | None:
    asked, limit = tracer.rows, machine.comfortable
    most = largest(lambda rows: tracer(rows).bytes, limit, asked)
    if most == 0:
        return None
    if most >= asked:
        return Option(overrides, reason, tracer(asked), most)
    rows = max(number for number in range(1, most + 1) if asked % number == 0)
    accumulation = tracer.accumulation * (asked // rows)
    words = (
        f"training.per_device_train_batch_size={rows}",
        f"training.gradient_accumulation_steps={accumulation}",
    )
    return Option((*overrides, *words), reason, tracer(rows), most)


def _new(target: Target, overrides: tuple[str, ...]) -> bool:
    """Whether each of the overrides changes the recipe, and the recipe's task knows it."""
    recipe = target.order.recipe
    training = recipe.training
    if CHECKPOINTING in overrides and training.get(training_section.checkpointing()):
        return False
    if BF16 in overrides and (training.get("bf16") or training.get("fp16")):
        return False
    return LORA not in overrides or ("lora" in type(recipe).model_fields and getattr(recipe, "lora", None) is None)
