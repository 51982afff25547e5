"""`hf-mps parity`: the same seeded steps on the CPU and on Metal; do they agree, and if not, which module is first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_mps.choice import Choice
    from hf_mps.parity.compare import Parity
    from hf_mps.target.find import Target
    from hf_mps.target.prepare import Parts
    from hf_mps.target.step import TrainingStep

STEPS = 3


def parity(target: Target, steps: int = STEPS, rows: int | None = None) -> tuple[Parity, dict[str, Choice[Any]]]:
    """Compare `steps` optimizer steps of `target` in batches of `rows` (default: the recipe's), and say over what.

    The recipe's own model and rows where they can be had, small stand-ins otherwise. Imports torch. Raises UserError
    for what cannot be run.
    """
    from hf_mps.target import metal, prepare

    device = metal.present()
    from hf_mps.choice import Choice
    from hf_mps.parity.compare import compare
    from hf_mps.parity.run import IN_FLOAT32, NO_DROPOUT, course

    courses = {}
    for name, where in (("cpu", Choice("cpu", "the reference, in float32")), ("mps", device)):
        with prepare.with_weights(target, name) as parts:
            made: list[TrainingStep] = []

            def make(parts: Parts = parts, where: Choice[str] = where, made: list[TrainingStep] = made) -> TrainingStep:
                changes = IN_FLOAT32 if where.value == "cpu" else {}
                made.append(prepare.step(parts, where, fake=False, changes=changes, rows=rows, steps=steps))
                return made[0]

            courses[name] = course(make, name, steps, parts.recipe.seed)
            facts = {"device": device, **made[0].facts, "dropout": NO_DROPOUT}
    return compare(courses["cpu"], courses["mps"], str(facts["precision"].value)), facts
