"""`--plan`: everything that a run would decide, each with its reason, without training and without a folder made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hf_mps.core import settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import plain
from hf_mps.core.text import first_line, summary
from hf_mps.distributed.world import World
from hf_mps.finetune import sharding
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run import processes
from hf_mps.finetune.run.logging import no_bars
from hf_mps.finetune.run.record import header
from hf_mps.finetune.run.stages import locate, make_plan, prepare_run, training_arguments
from hf_mps.layer.activation import activate
from hf_mps.layer.fused_step import switch
from hf_mps.metal.device import simulated
from hf_mps.tools.dryrun.memory.machine import present
from hf_mps.tools.dryrun.resolve import Target

UNKNOWN = "not known"


def show(resolved: ResolvedRecipe, *, fresh: bool = False, as_json: bool = False) -> dict[str, Any]:
    """Print the plan of a run as its header would have it, or as JSON, and return what the JSON says.

    - `name`, `recipe`: as in results.json
    - `simulated`: bool, whether the device of the run is a simulated one
    - `choices`: {name: {"value": any, "reason": str}}, among them `parameters`, `memory`, `operators`, `launches`
    - `parameters`: {"trainable": int, "frozen": int}; `buckets`: [int], the lengths that batches are padded to

    Raises UserError for what a run would refuse.
    """
    settings.refuse_unknown()
    source, run_dir = locate(resolved, fresh=fresh)
    source.refuse_absent()
    with status.shown("loading PyTorch, the rows and the model …"), no_bars():
        activate.activate()
        from hf_mps.tools.dryrun.memory import adjust  # which imports torch

        run = prepare_run(resolved, source, run_dir)
        run, world = replace(run, adjustments=adjust.estimate_fit(run)), World.here()
        plan = make_plan(run, Choice(run_dir.path, run_dir.reason))
        plan = processes.go_on(plan, run_dir.checkpoint, world.size)
        training_arguments(plan, run.prepared)
        status.now("tracing a training step …")
        counts = [0, 0]  # frozen and trainable parameters, each counted once where two layers share it
        for parameter in run.prepared.model.parameters():
            counts[parameter.requires_grad] += parameter.numel()
        share = f"{counts[1] / max(1, sum(counts)):.1%} of {type(run.prepared.model).__name__}'s are trained"
        plan.choices["parameters"] = Choice(f"{counts[1]:,} trainable, {counts[0]:,} frozen", share)
        as_made = resolved.with_overrides(run.adjustments.overrides)
        sharded: dict[str, Choice[Any]] = {}
        if sharding.KEY in plan.choices:  # which is traced in a process that no launcher has made one of several
            ranks = resolved.command("plan", "--ranks", str(world.size))
            sharded = {"memory": Choice(UNKNOWN, f"what each rank holds: {ranks}")}
        fused = plan.choices["fused_step"].value != switch.OFF
        plan.choices.update(_traced(as_made, run.device.value, fused) | sharded)
    content = {
        "name": resolved.name,
        "recipe": resolved.recipe.model_dump(exclude_none=True),
        "simulated": simulated(run.device.value),
        "choices": plan.shown(),
        "parameters": {"trainable": counts[1], "frozen": counts[0]},
        "buckets": list(getattr(plan.choices["lengths"].value, "shapes", ())) if "lengths" in plan.choices else [],
    }
    result: dict[str, Any] = plain(content)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        header(resolved, plan, verb="plan of")
    return result


def _traced(resolved: ResolvedRecipe, device: str, fused: bool) -> dict[str, Choice[Any]]:
    """Return what a traced training step tells: its peak, and on a Mac's GPU whether this Mac has room for it; its
    operators that have no Metal kernel, those that the recipe names marked; and its launches.

    A step that is to be `fused` is traced as it is before: the parts act on tensors that hold numbers alone.
    """
    from hf_mps.metal.operators.table import OperatorSupport
    from hf_mps.tools.dryrun.audit.record import audit_of
    from hf_mps.tools.dryrun.launches import Launches, table_of
    from hf_mps.tools.dryrun.memory import plan
    from hf_mps.tools.dryrun.memory.fit import gib

    try:
        estimate = plan.estimate(Target(resolved.name, resolved), record=True)
    except Exception as error:  # whatever a step does that a trace cannot follow: the rest of the plan stays
        ours = isinstance(error, (UserError, RunError))
        why = first_line(error) if ours else f"it cannot be traced: {summary(error)}"
        return dict.fromkeys(("memory", "operators", "launches"), Choice(UNKNOWN, why))
    machine, size = present(), f"{gib(estimate.bytes)} live at peak"
    reason = f"estimated from a traced step; what it is made of: {resolved.command('plan')}"
    told = Choice(size, reason)
    if device == "mps":
        share = f"{estimate.bytes / machine.comfortable:.0%} of what {machine.name} may use"
        told = Choice(f"{size}: {machine.verdict(estimate.bytes)}", f"{share}; {reason}")
    assert estimate.recorded is not None  # asked for above
    result = audit_of(resolved.name, estimate.recorded, OperatorSupport(), {}, table_of(None))
    lacking = [
        f"{entry.operator} (as the recipe names it)" if entry.operator in resolved.recipe.fallback else entry.operator
        for entry in result.findings
    ]
    reason = f"of {len(result.entries)} in a training step; with their places: {resolved.command('audit')}"
    without = f"without a Metal kernel: {', '.join(lacking)}" if lacking else "all have a Metal kernel"
    launches: Choice[Any] = Choice(UNKNOWN, result.launches.reason if isinstance(result.launches, Choice) else "")
    if isinstance(result.launches, Launches):
        before = "of a step as the plain Trainer makes it, before it is fused; " if fused else ""
        launches = Choice(result.launches.choice.value, f"{before}{result.launches.choice.reason}")
    return {"memory": told, "operators": Choice(without, reason), "launches": launches}
