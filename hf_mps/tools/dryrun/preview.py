"""`--plan`: everything that a run would decide, each with its reason, without training and without a folder made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_mps.core import settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import plain
from hf_mps.core.text import first_line, summary
from hf_mps.distributed.world import World
from hf_mps.finetune import sharding
from hf_mps.finetune.run.stages import locate, make_plan, prepare_run
from hf_mps.layer.fused_step import switch

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.resolve import ResolvedRecipe
    from hf_mps.finetune.tasks._base import Prepared

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
    from hf_mps.finetune.run.logging import no_bars
    from hf_mps.finetune.run.stages import training_arguments
    from hf_mps.layer.activation import activate
    from hf_mps.metal.device import simulated

    with status.shown("loading PyTorch, the rows and the model …"), no_bars():
        activate.activate()
        from hf_mps.finetune.run import processes, tables
        from hf_mps.tools.dryrun.memory import adjust  # which imports torch

        run = prepare_run(resolved, source, run_dir)
        device, prepared = run.device, run.prepared
        run = replace(run, adjustments=adjust.estimate_fit(run))
        plan = processes.go_on(
            make_plan(run, Choice(run_dir.path, run_dir.reason)), run_dir.checkpoint, World.here().size
        )
        training_arguments(plan, prepared)
        trainable, frozen = _parameters(prepared.model)
        as_made = resolved.with_overrides(run.adjustments.overrides)
        plan.choices.update(_foreseen(as_made, prepared, device.value, (trainable, frozen)))
        if sharding.KEY in plan.choices:
            plan.choices["memory"] = _of_each_rank(resolved)
        plan.choices["launches"] = _unfused(plan.choices["launches"], plan.choices["fused_step"])
    content = {
        "name": resolved.name,
        "recipe": resolved.recipe.model_dump(exclude_none=True),
        "simulated": simulated(device.value),
        "choices": plan.shown(),
        "parameters": {"trainable": trainable, "frozen": frozen},
        "buckets": list(getattr(plan.choices["lengths"].value, "shapes", ())) if "lengths" in plan.choices else [],
    }
    result: dict[str, Any] = plain(content)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        tables.header(resolved, plan, verb="plan of")
    return result


def _foreseen(
    resolved: ResolvedRecipe, prepared: Prepared, device: str, parameters: tuple[int, int]
) -> dict[str, Choice[Any]]:
    """What a run will need that only shows once it runs."""
    status.now("tracing a training step …")
    trainable, frozen = parameters
    share = f"{trainable / max(1, trainable + frozen):.1%} of {type(prepared.model).__name__}'s are trained"
    return {
        "parameters": Choice(f"{trainable:,} trainable, {frozen:,} frozen", share),
        "memory": _memory(resolved, device),
        **_operators(resolved),
    }


def _parameters(model: Any) -> tuple[int, int]:
    """The number of trainable and of frozen parameters, each counted once where two layers share it."""
    counts = [0, 0]
    for parameter in model.parameters():
        counts[not parameter.requires_grad] += parameter.numel()
    return counts[0], counts[1]


def _memory(resolved: ResolvedRecipe, device: str) -> Choice[Any]:
    """The peak of a training step, and on a Mac's GPU whether this Mac has room for it."""
    from hf_mps.tools.dryrun import metal_device, prepare
    from hf_mps.tools.dryrun.memory.fit import gib
    from hf_mps.tools.dryrun.memory.machine import present
    from hf_mps.tools.dryrun.memory.trace import Tracer
    from hf_mps.tools.dryrun.resolve import Target

    try:
        with prepare.weightless(Target(resolved.name, resolved)) as parts:
            estimate = Tracer(parts, metal_device())()
    except Exception as error:  # whatever a step does that a trace cannot follow: the rest of the plan stands
        return _not_known(error)
    reason = f"estimated from a traced step; what it is made of: {resolved.command('plan')}"
    if device == "mps":
        machine = present()
        share = f"{estimate.bytes / machine.comfortable:.0%} of what {machine.name} may use"
        return Choice(f"{gib(estimate.bytes)} live at peak: {machine.verdict(estimate.bytes)}", f"{share}; {reason}")
    return Choice(f"{gib(estimate.bytes)} live at peak", reason)


def _of_each_rank(resolved: ResolvedRecipe) -> Choice[Any]:
    """The peak of a training step on each rank, as `hf-mps plan --ranks` tells it in a process without a launcher."""
    from hf_mps.tools.dryrun.memory import sharded
    from hf_mps.tools.dryrun.memory.fit import gib

    ranks = World.here().size
    try:
        estimate = sharded.told_apart(resolved, ranks)
    except RunError as error:
        return _not_known(error)
    reason = f"of each rank; what it is made of: {resolved.command('plan', '--ranks', str(ranks))}"
    return Choice(f"{gib(estimate['bytes'])} live at peak", reason)


def _unfused(launches: Choice[Any], fused_step: Choice[str]) -> Choice[Any]:
    """Say what a trace counts of a step that is to be fused: the parts act on tensors that hold numbers alone."""
    if fused_step.value == switch.OFF or launches.value == UNKNOWN:
        return launches
    return Choice(
        launches.value, f"of a first step as the plain Trainer makes it, before it is fused; {launches.reason}"
    )


def _not_known(error: Exception) -> Choice[Any]:
    ours = isinstance(error, (UserError, RunError))
    return Choice(UNKNOWN, first_line(error) if ours else f"it cannot be traced: {summary(error)}")


def _operators(resolved: ResolvedRecipe) -> dict[str, Choice[Any]]:
    """The operators of a training step that have no Metal kernel, those that the recipe names marked; its launches."""
    from hf_mps.tools.dryrun.audit import audit
    from hf_mps.tools.dryrun.launches import Launches
    from hf_mps.tools.dryrun.resolve import Target

    try:
        result = audit(Target(resolved.name, resolved))
    except Exception as error:
        return dict.fromkeys(("operators", "launches"), _not_known(error))
    lacking = [
        f"{entry.operator} (as the recipe names it)" if entry.operator in resolved.recipe.fallback else entry.operator
        for entry in result.findings
    ]
    reason = f"of {len(result.entries)} in a training step; with their places: {resolved.command('audit')}"
    without = f"without a Metal kernel: {', '.join(lacking)}" if lacking else "all have a Metal kernel"
    launches = result.launches
    told = launches.choice if isinstance(launches, Launches) else Choice(UNKNOWN, launches.reason if launches else "")
    return {"operators": Choice(without, reason), "launches": told}
