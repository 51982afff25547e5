"""Each guard and sentinel with its state and reason; with --trials, what each finds when it tries this device.

The trials run in a process of their own, since some faults of Metal end the process that meets them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hf_mps.core.text import summary
from hf_mps.doctor.findings import Finding, note, ok, problem
from hf_mps.guards import known_faults
from hf_mps.guards.catalogue import INSTALLED_AFTER

IDLE = ("needless", "waits", "on")
Verdict = Literal["faulty", "right", "not tried", "failed", "ended"]
TRIED = "tried on the device"
"""How a guard's reason begins where a trial found it out."""
LONGEST = 300
"""Seconds without a word after which a trial counts as ended; the longest takes some seconds on a slow Mac."""


def examine() -> list[Finding]:
    """The lines of `hf_mps.guards.report()`; a guard that could not be installed is a problem.

    Without Metal the many that have nothing to do are one line.
    """
    from hf_mps import guards
    from hf_mps.device import choice

    _import_libraries()
    found = []
    states, metal = guards.report().guards, choice.metal().value
    idle = [each for each in states if not metal and each.state in IDLE]
    for each in states:
        if each in idle:
            continue
        if each.state == "failed":
            found.append(problem(each.name, f"failed: {each.reason}", "pip install --upgrade hf-mps"))
        elif each.state == "off by user":
            found.append(note(each.name, f"off: {each.reason}; {each.what}", "unset HF_MPS_GUARDS"))
        else:
            found.append(ok(each.name, f"{each.state}: {each.reason}"))
    if idle:
        found.append(ok("idle", f"{len(idle)} guards have nothing to do: the hazards are Metal's, and there is none"))
    return found


def _import_libraries() -> None:
    """Import what the guards wait for, where it is installed: only then do they know what they have to do."""
    for name in INSTALLED_AFTER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@dataclass(frozen=True)
class Trial:
    """What one guard's trial found; `listed` is whether the list of known problems has the fault for this Mac.

    A trial that `failed` raised an error and says nothing of the fault; one that `ended` took its process with it.
    """

    name: str
    verdict: Verdict
    says: str
    issue: str
    listed: bool
    seconds: float

    @property
    def news(self) -> bool:
        """Whether the device is not as the list of known problems has it."""
        return self.verdict in ("failed", "ended", "right" if self.listed else "faulty")


def try_all(names: Sequence[str] | None = None) -> list[Trial]:
    """Run the trials of these guards, by default of all that are about the device; none where there is no Metal."""
    left = list(_concerned() if names is None else names)
    found: list[Trial] = []
    while left:
        before = len(left)
        for each in _child(left):
            found.append(each)
            left.remove(each.name)
        if len(left) == before:  # a process that could not even start
            found += [_trial(name, "not tried", "the process of the trials did not start", 0.0) for name in left]
            break
    return found


def examine_trials(trials: Sequence[Trial]) -> list[Finding]:
    """The trials as lines of the report. A fault that a guard cures is no problem; one that ends the process is."""
    found = []
    for each in trials:
        says = f"{each.verdict}: {each.says}"
        if each.verdict == "ended":
            found.append(problem(each.name, says, each.issue))
        elif each.verdict == "failed":
            found.append(note(each.name, says, each.issue))
        elif each.news:
            listed = (
                "listed as faulty for this torch and Mac" if each.listed else "listed as right for this torch and Mac"
            )
            found.append(note(each.name, f"{says}; {listed}", each.issue))
        elif each.verdict == "faulty":
            found.append(note(each.name, f"{says}; cured here", each.issue))
        else:
            found.append(ok(each.name, says))
    return found


def _concerned() -> list[str]:
    """The guards against faults of the device, in the catalogue's order."""
    from hf_mps.device import choice
    from hf_mps.guards import catalogue, registry

    if not choice.metal(owned=True).value:
        return []
    return [name for name in catalogue.NAMES if registry.get(name).releases is not None]


def _child(names: Sequence[str]) -> Iterator[Trial]:
    """The trials of one process, up to the first that ends it."""
    command = [sys.executable, "-m", "hf_mps.doctor.guards", *names]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun = time.monotonic()
    try:
        out, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err = f"no answer for {LONGEST} seconds"
    running = ""
    for line in out.splitlines():
        if not line.startswith(('{"begins"', '{"name"')):  # whatever a library prints
            continue
        told = json.loads(line)
        running = told.get("begins", "")
        if not running:
            yield Trial(**told)
    if running:
        last = next((line for line in reversed(err.splitlines()) if line.strip()), "it said nothing")
        yield _trial(running, "ended", f"{_ending(process.returncode)}: {last.strip()}", time.monotonic() - begun)


def _ending(code: int) -> str:
    if code < 0:
        return f"the trial ended its process by {signal.Signals(-code).name}"
    return f"the trial ended its process with exit code {code}"


def _trial(name: str, verdict: Verdict, says: str, seconds: float) -> Trial:
    from hf_mps.guards import registry

    return Trial(name, verdict, says, registry.get(name).issue, known_faults.listed(name), round(seconds, 2))


def main(names: Sequence[str]) -> None:
    """Try these guards one after the other and print a JSON line before each and after it."""
    from hf_mps.activation.activate import activate
    from hf_mps.guards import registry

    activate()
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        guard, begun = registry.get(name), time.monotonic()
        try:
            found = guard.tried()
        except Exception as error:
            made = _trial(name, "failed", summary(error), time.monotonic() - begun)
        else:
            verdict: Verdict = "faulty" if found.value else "right"
            if not found.reason.startswith(TRIED):
                verdict = "not tried"
            says = found.reason.removeprefix(f"{TRIED}: ").removeprefix(f"{TRIED}, ")
            made = _trial(name, verdict, says, time.monotonic() - begun)
        print(json.dumps(asdict(made)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
