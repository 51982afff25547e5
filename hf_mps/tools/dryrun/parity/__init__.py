"""`hf-mps parity`: the same seeded steps on the CPU and on Metal; do they agree, and if not, which module is first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run.stages import PreparedRun
from hf_mps.metal.device import choose
from hf_mps.tools.dryrun import metal_device, prepare
from hf_mps.tools.dryrun.parity.compare import Parity, compare, once_or_twice, verdict
from hf_mps.tools.dryrun.parity.trace import IN_FLOAT32, NO_DROPOUT, Trace, Weights, trace_steps
from hf_mps.tools.dryrun.resolve import Target
from hf_mps.tools.dryrun.step import TrainingStep

STEPS = 3
REFERENCE = Choice("cpu", "the reference, in float32")


def parity(target: Target, steps: int = STEPS, rows: int | None = None) -> tuple[Parity, dict[str, Choice[Any]]]:
    """Compare `steps` optimizer steps of `target` in batches of `rows` (default: the recipe's), and say over what.

    The recipe's own model and rows where they can be had, small stand-ins otherwise. Raises UserError for what
    cannot be run.
    """
    device, resolved = metal_device(), target.resolved
    facts: dict[str, Choice[Any]] = {}
    if (stored := resolved.recipe.weights) != "float32":
        recipe = resolved.recipe.model_copy(update={"weights": "float32"})
        target = replace(target, resolved=replace(resolved, recipe=recipe))
        why = f"the recipe's {stored} rounds more than a wrong kernel may be off"
        facts["weights"] = Choice("float32", why)
    with prepare.with_weights(target, device) as parts:
        # One set of rows and weights for both: a tokenizer that is trained on the spot comes out otherwise each time.
        start, seed = Weights(parts.prepared), parts.recipe.seed

        def trace(where: Choice[str], run: PreparedRun) -> Trace:
            def make() -> TrainingStep:
                start.restore()
                step = prepare.step(replace(parts, run=run), where, fake=False, rows=rows, steps=steps)
                facts.update(step.facts)
                return step

            return trace_steps(make, where.value, steps, seed)

        recipe = parts.run.resolved.recipe
        exact = recipe.model_copy(update={"training": {**recipe.training, **IN_FLOAT32}})
        reference = trace(REFERENCE, replace(parts.run, resolved=replace(parts.run.resolved, recipe=exact)))
        metal_trace, again = once_or_twice(reference, lambda: trace(device, parts.run))
    facts = {"device": device, **facts, "dropout": NO_DROPOUT}
    return compare(reference, metal_trace, str(facts["precision"].value), again), facts


def require(resolved: ResolvedRecipe) -> None:
    """Before a training: print the verdict in a line. Raises RunError where the devices differ.

    Raises UserError where the run's device is not Metal, or nothing can be compared.
    """
    chosen = choose()
    if chosen.value != "mps":
        raise UserError(f"--check-parity compares Metal with the CPU, and the device is {chosen}; leave it out")
    result, _ = parity(Target(resolved.name, resolved))
    print(f"parity: {verdict(result)}", flush=True)
    if not result.same:
        raise RunError(f"nothing was trained; the whole comparison: hf-mps parity {' '.join(resolved.words)}")
