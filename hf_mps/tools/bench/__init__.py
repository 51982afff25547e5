"""`hf-mps bench`: training and evaluation of the field's networks, or of your own case, the device over the CPU.

`networks` are what Metal training was announced with, `cases` makes those and recipes alike and reads the clock,
`outcome` is what was found, as table, picture, JSON and one signed line. Here is also what counts instead: a training
step's launches with their classes, waits and copies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_mps.core import settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import write_atomic
from hf_mps.core.text import aligned, counted
from hf_mps.layer.activation import activate
from hf_mps.metal import simulator
from hf_mps.metal.device import choose, memory
from hf_mps.tools.bench import outcome
from hf_mps.tools.bench.cases import FEWEST, TRAINING, Case, Settings, of_target, timed
from hf_mps.tools.dryrun import metal_device, render
from hf_mps.tools.dryrun.resolve import Target

WHOLE, QUICK = Settings(warm_up=3, repetitions=10, seconds=60.0), Settings(warm_up=1, repetitions=3, seconds=10.0)
LOADING = "loading PyTorch …"


@dataclass(frozen=True)
class Asked:
    """What a command asks for: a target in place of the field's networks, smaller batches, and how much is measured."""

    command: str
    target: Target | None = None
    quick: bool = False
    warm_up: int | None = None
    repetitions: int | None = None

    @property
    def name(self) -> str:
        """Return what is measured, in words."""
        return self.target.name if self.target else "ResNet50, BERT, VGG16"

    @property
    def settings(self) -> Settings:
        """Return how much is measured."""
        own = QUICK if self.quick else WHOLE
        return Settings(self.warm_up or own.warm_up, self.repetitions or own.repetitions, own.seconds)


def run(asked: Asked, output: Path | None, sign: str | None, *, as_json: bool = False) -> None:
    """Measure, write the files and print what was found; with `sign` the line for the collection too.

    Raises UserError for what cannot be run or written, RunError where a batch did not fit into the memory.
    """
    _tell(LOADING)
    with status.shown(LOADING):
        name = outcome.signer(sign) if sign is not None else None
        folder = outcome.folder_for(output)
        found = measure(asked)
        files = found.write(folder)
    report = found.report()
    print(render.render(report, render.form(json=as_json)))
    if name is not None:
        files.append(write_atomic(folder / "row.jsonl", found.signed(name) + "\n"))
    if not as_json:
        print("\n".join(["", *(f"  written  {file}" for file in files)]))
        if name is not None:
            print(f"  next     add the line of {files[-1]} to {outcome.COLLECTION} and send it as a pull request")
    if report.problem:
        raise RunError(f"bench: {report.problem}")


def run_count(asked: Asked, release: str | None, *, as_json: bool = False) -> None:
    """Count what a training step gives the simulated device to do, and print it. Raises UserError as `count`."""
    _tell(LOADING)
    with status.shown(LOADING):
        facts, found = count(asked, release)
    body, values = ["", *lines(found)], {"kind": "launches", "cases": found}
    render.show(render.Report("bench", asked.name, facts, body, values), render.form(json=as_json))


def measure(asked: Asked) -> outcome.Outcome:
    """Time every case on the device that a run would take, and on the CPU. Imports torch.

    Raises UserError for what cannot be run.
    """
    settings.refuse_unknown()
    activate.activate()
    device, limits = choose(), asked.settings
    how = Choice(
        f"median of {limits.repetitions}",
        f"after {counted(limits.warm_up, 'step')} to warm up; at least {FEWEST}, and no further one after"
        f" {limits.seconds:.0f} s; the device has done each step when the clock is read",
    )
    devices = [device] if device.value == "cpu" else [device, Choice("cpu", "what the device is compared with")]
    with _cases(asked) as cases:
        found = [row for case in cases for row in _timed(case, devices, asked)]
    return outcome.Outcome(asked, outcome.facts_of(asked, device, how), found)


def count(asked: Asked, release: str | None) -> tuple[dict[str, Choice[Any]], list[dict[str, Any]]]:
    """Return the facts, and what a training step of every case launches on the simulated device, means of STEPS.

    `on_a_mac` is what they launch on PyTorch `release`, by default the installed one. Imports torch. Raises UserError
    as `measure`, and where the device is a Mac's own.
    """
    settings.refuse_unknown()
    device = metal_device()
    if simulator.loaded() is None:
        raise UserError("--launches counts on the simulated device, and this one is real; next: the same on Linux")
    from hf_mps.tools.dryrun.launches import table_of

    table = table_of(release)
    with _cases(asked) as cases:
        found = [{"network": case.name, **_counted(case, device, table)} for case in cases]
    return outcome.facts_of(asked, device, HOW), found


@contextmanager
def _cases(asked: Asked) -> Iterator[Sequence[Case]]:
    if asked.target is not None:
        with of_target(asked.target, asked.quick) as case:
            yield [case]
        return
    from hf_mps.tools.bench.networks import NETWORKS

    yield [network.case(asked.quick) for network in NETWORKS]


def _timed(case: Case, devices: Sequence[Choice[str]], asked: Asked) -> list[dict[str, Any]]:
    """Return a row for each phase of a case, with the figures of every device."""
    rows: dict[str, dict[str, Any]] = {}
    for device in devices:
        name = device.value
        _tell(f"{case.name} on {name}: making the model …")
        # What the device before left cached would count as this one's.
        memory.release(name)
        with case.make(device) as work:
            for phase, steps in work.phases.items():
                said = f"{case.name}, {phase} on {name}"
                _tell(f"{said} …")
                # What the phase before left cached is none of this one.
                memory.release(name)

                def told(done: int, said: str = said) -> None:
                    status.now(f"{said}: {counted(done, 'repetition')} …")

                found = timed(steps, name, asked.settings, work.batch, told)
                first = {"network": case.name, "phase": phase, **work.size, "devices": {}, "facts": {}}
                row = rows.setdefault(phase, first)
                row["devices"][name], row["facts"][name] = found, dict(work.facts)
        # Either name would keep the model, and its memory would count as the next device's.
        del work, steps
        memory.release(name)
    return list(rows.values())


def _tell(words: str) -> None:
    """Say what is going on: a benchmark takes minutes. A terminal has its status line, a log gets a line on stderr."""
    status.now(words)
    if not sys.stderr.isatty():
        print(words, file=sys.stderr, flush=True)


STEPS, FIRST = 4, 3
"""Steps that are counted, and those before: optimizers make their states and guards take their looks."""
HOW = Choice("counts of a step", f"means of {STEPS} steps after {FIRST}, not fused; a launch is a dispatch or a graph")
SHOWN = ("launches", "blits", "waits", "copies_in", "copies_out")


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
