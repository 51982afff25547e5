"""What a training step gives the device to do: launches with their classes, waits and copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import aligned
from hf_mps.metal import simulator
from hf_mps.tools.bench.cases import TRAINING, Case

STEPS, FIRST = 4, 3
"""Steps that are counted, and those before: optimizers make their states and guards take their looks."""
HOW = Choice("counts of a step", f"means of {STEPS} training steps after {FIRST}; a launch is a dispatch or a graph")
SHOWN = ("launches", "blits", "waits", "copies_in", "copies_out")


def of_cases(cases: Iterable[Case], device: Choice[str], release: str | None) -> list[dict[str, Any]]:
    """Return the counts of a training step of each case on the simulated device, means of STEPS.

    `classes` are what they launch on PyTorch `release`, by default the installed one. Raises UserError where the device
    is not simulated: a Mac does not count.
    """
    if simulator.loaded() is None:
        raise UserError("--launches counts on the simulated device, and this one is real; next: the same on Linux")
    from hf_mps.tools.dryrun.launches import table_of

    table = table_of(release)
    return [{"network": case.name, **_counted(case, device, table)} for case in cases]


def _counted(case: Case, device: Choice[str], table: Any) -> dict[str, Any]:
    from hf_mps.layer import guards
    from hf_mps.tools.dryrun.audit.record import OperatorRecorder
    from hf_mps.tools.dryrun.launches import of_calls

    with case.make(device) as work:
        counts: list[simulator.Counted] = []

        def begin(number: int) -> None:
            if number == FIRST:
                counts.append(simulator.Counted())
            if number == FIRST + STEPS:
                counts[0].stop()

        work.phases[TRAINING](FIRST + STEPS, begin, ())
        recorder = OperatorRecorder(work.tracker)
        # Apart from the count: who watches each operator in Python reads numbers, and a loop's first step makes states.
        # A trainer begins anew, and so would sentinels, which look at each weight in a training's first steps.
        with guards.suspended(kind="sentinel"):
            work.phases[TRAINING](2, lambda number: recorder.forget() if number == 1 else None, [recorder])
        launched = {"reason": table.reason} if isinstance(table, Choice) else of_calls(recorder.calls, table).values()
        each = {name: round(value / STEPS, 2) for name, value in asdict(counts[0].figures).items()}
        return {**work.size, **each, "on_a_mac": launched}


def lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the counts as a table for people."""

    def classes(each: dict[str, Any]) -> str:
        launched = each["on_a_mac"]
        if "classes" not in launched:
            return f"not known: {launched['reason']}"
        several = ", ".join(f"{count:,} {name}" for name, count in launched["classes"].items() if count)
        return f"torch {launched['release']}: {launched['launches']:,} launches ({several})"

    head = ("network", "batch", "row", *(name.replace("_", " ") for name in SHOWN), "on a Mac")
    rows = [head]
    for each in found:
        rows.append((each["network"], str(each["batch"]), each["row"], *(f"{each[n]:g}" for n in SHOWN), classes(each)))
    return [f"  {line}" for line in aligned(rows, right=(1, 3, 4, 5, 6, 7), widest=60)]
