"""The estimate of a target's step, and the plan: that estimate against a machine, with what would make it fit."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from hf_mps.core.choice import Choice
from hf_mps.finetune.features.machine import MemoryAdjustments
from hf_mps.tools.dryrun import launches, metal_device, prepare
from hf_mps.tools.dryrun.memory import adjust
from hf_mps.tools.dryrun.memory.fit import CHECKPOINTING, MemoryPlan, least, ranked
from hf_mps.tools.dryrun.memory.machine import Machine, present
from hf_mps.tools.dryrun.memory.trace import Estimate, Tracer
from hf_mps.tools.dryrun.resolve import Target
from hf_mps.tools.dryrun.step import model_errors


def estimate(target: Target, *, length: int | None = None, record: bool = False) -> Estimate:
    """The peak of one training step of `target`, with batches of `length` tokens (default: what rows are cut to).

    With `record` its operators are in `recorded`. Raises UserError for what cannot be looked at, RunError where the
    step reads values, which fake tensors do not have.
    """
    device = metal_device()
    with model_errors(target.resolved), prepare.weightless(target) as parts:
        return Tracer(parts, device, length, record)()


def plan(
    target: Target, machine: Machine | None = None, *, length: int | None = None, release: str | None = None
) -> MemoryPlan:
    """Return the estimate against `machine` (default: the present one), the largest batch, and what would make it fit.

    Where it does not fit as it is, of what the run itself would change so that it does: `facts` has those choices.
    And what the step launches on the PyTorch `release` (default: the installed one). Raises as `estimate` does, and
    UserError for a release whose launches are not known.
    """
    device, machine, made = metal_device(), machine or present(), MemoryAdjustments()
    table = launches.table_of(release)
    with model_errors(target.resolved), ExitStack() as stack:

        def tracer_of(target: Target, trained: Collection[str] = ()) -> Tracer:
            parts = stack.enter_context(prepare.weightless(target))
            return Tracer(parts, device, length, record=True, trained=trained)

        tracer, checkpointed = tracer_of(target), list[Tracer]()

        def likely() -> Estimate | None:
            """Return the checkpointed step with its operators, so that it is traced once; None where it does not fit.

            Tried where weights and moments leave half of the machine. Else a step without operators costs half.
            """
            if least({}, tracer()) > machine.comfortable / 2:
                return None
            with model_errors(target.resolved):
                checkpointed.append(tracer_of(target.varied(CHECKPOINTING), tracer().trained))
                found = checkpointed[0]()
            return found if machine.verdict(found.bytes) == "fits" else None

        if machine.verdict(tracer().bytes) != "fits":
            made = adjust.make(target, machine, device, length, tracer(), likely)
        # The run would make these changes itself: the plan is of the step that it then takes.
        if made.overrides:
            target, same = target.varied(made.overrides), made.overrides == CHECKPOINTING
            tracer = checkpointed[0] if same and checkpointed else tracer_of(target, tracer().trained)
        estimate, most = tracer(), tracer.largest(machine.comfortable)
        fits = machine.verdict(estimate.bytes) == "fits"
        options = () if fits else tuple(ranked(target, machine, device, length, made.overrides, tracer))
    recorded = estimate.recorded
    assert recorded is not None  # asked for above
    found = table if isinstance(table, Choice) else launches.of_calls(recorded.calls, table, recorded.more)
    facts = {"device": device, **launches.asked_for(release, table), **estimate.facts, **made.choices}
    return MemoryPlan(target.name, machine, estimate, most, options, facts, found)
