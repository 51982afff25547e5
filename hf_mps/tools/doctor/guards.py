"""The guards and sentinels with their states and reasons, and with --trials the results of trying this device.

The trials run in a separate process, since some faults of Metal end their process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hf_mps.core import import_hooks, status
from hf_mps.core.text import summary
from hf_mps.layer import guards
from hf_mps.layer.activation.activate import activate
from hf_mps.layer.guards.base import TRIED
from hf_mps.layer.guards.catalogue import GUARDS, registry
from hf_mps.metal.device import choice, faults
from hf_mps.tools.doctor.findings import Finding, note, ok, problem

IDLE = ("needless", "waits", "on")
Verdict = Literal["faulty", "right", "not tried", "failed", "ended"]
LONGEST = 300
"""Seconds without output after which a trial counts as ended; the longest takes some seconds on a slow Mac."""


def examine() -> list[Finding]:
    """Return the lines of `hf_mps.guards.report()`; a guard that could not be installed is a problem.

    Without Metal the many that have nothing to do are one line.
    """
    # The guards wait for these: only then do they know what they have to do.
    for library in GUARDS.after:
        status.now(f"importing {library}, for what guards act on …")
        # Whatever it raises: a broken package that it imports (torchvision of another torch) raises a RuntimeError.
        with contextlib.suppress(Exception), import_hooks.uncollected():
            importlib.import_module(library)
    on_metal = choice.metal().value
    idle = 0
    findings = []
    for guard in guards.report().guards:
        if not on_metal and guard.state in IDLE:
            idle += 1
        elif guard.state == "failed":
            findings.append(problem(guard.name, f"failed: {guard.reason}", "pip install --upgrade hf-mps"))
        elif guard.state == "off by user":
            findings.append(note(guard.name, f"off: {guard.reason}; {guard.what}", "unset HF_MPS_GUARDS"))
        else:
            findings.append(ok(guard.name, f"{guard.state}: {guard.reason}"))
    if idle:
        findings.append(ok("idle", f"{idle} guards have nothing to do, as there is no Metal"))
    return findings


@dataclass(frozen=True)
class Trial:
    """The result of a guard's trial; `listed`: the list of known problems has the fault for this Mac.

    A trial that `failed` raised an error and shows nothing about the fault; one that `ended` ended its process.
    """

    name: str
    verdict: Verdict
    says: str
    issue: str
    listed: bool
    seconds: float

    @property
    def news(self) -> bool:
        """Return whether the device is not as the list of known problems has it."""
        return self.verdict in ("failed", "ended", "right" if self.listed else "faulty")


def try_all(names: Sequence[str] | None = None) -> list[Trial]:
    """Run the trials of these guards, by default of all that are about the device; none where there is no Metal."""
    if names is None:
        names = [name for name in GUARDS.names if faults.cured_by(name)] if choice.metal(owned=True).value else []
    left, trials = list(names), list[Trial]()
    # One process tries them all until one ends it; the next process goes on behind that one.
    while left:
        if not (ended := list(_child(left))):  # a process that could not even start
            return trials + [_trial(name, "not tried", "the trials' process did not start", 0.0) for name in left]
        trials += ended
        left = [name for name in left if name not in {trial.name for trial in ended}]
    return trials


def examine_trials(trials: Sequence[Trial]) -> list[Finding]:
    """The trials as lines of the report. A fault that a guard cures is no problem; one that ends the process is."""
    found = []
    for trial in trials:
        says = f"{trial.verdict}: {trial.says}"
        if trial.verdict == "ended":
            found.append(problem(trial.name, says, trial.issue))
        elif trial.verdict == "failed":
            found.append(note(trial.name, says, trial.issue))
        elif trial.news:
            listed = "faulty" if trial.listed else "right"
            found.append(note(trial.name, f"{says}; listed as {listed} for this torch and Mac", trial.issue))
        elif trial.verdict == "faulty":
            found.append(note(trial.name, f"{says}; cured here", trial.issue))
        else:
            found.append(ok(trial.name, says))
    return found


def _child(names: Sequence[str]) -> Iterator[Trial]:
    """Yield the trials of one process, up to the first that ends it."""
    command = [sys.executable, "-m", "hf_mps.tools.doctor.guards", *names]
    heard, running = time.monotonic(), ""
    # Its stderr is a file: nobody reads a pipe meanwhile, and the process would wait where that is full.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        while line := _line(process):
            heard = time.monotonic()
            if not line.startswith(('{"begins"', '{"name"')):  # whatever a library prints
                continue
            values = json.loads(line)
            running = values.get("begins", "")
            if not running:
                yield Trial(**values)
        seconds, code = time.monotonic() - heard, process.wait()
        err.seek(0)
        last = next((line for line in reversed(err.read().splitlines()) if line.strip()), "it said nothing")
    if running:
        last = f"no answer for {LONGEST} seconds" if seconds >= LONGEST else last.strip()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        yield _trial(running, "ended", f"the trial ended its process {how}: {last}", seconds)


def _line(process: Any) -> str:
    """Return the next line that a process prints, empty at its end; one that is silent for LONGEST seconds is ended."""
    watch = threading.Timer(LONGEST, process.kill)
    watch.start()
    line: str = process.stdout.readline()
    watch.cancel()
    return line


def _trial(name: str, verdict: Verdict, says: str, seconds: float) -> Trial:
    listed = faults.possible(*faults.cured_by(name))
    return Trial(name, verdict, says, registry().get(name).issue, listed, round(seconds, 2))


def main(names: Sequence[str]) -> None:
    """Try these guards one after the other and print a JSON line before each and after it."""
    activate()
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        guard, begun = registry().get(name), time.monotonic()
        verdict: Verdict
        try:
            outcome = guard.tried()
        except Exception as error:
            verdict, says = "failed", summary(error)
        else:
            verdict = "faulty" if outcome.value else "right"
            if not outcome.reason.startswith(TRIED):
                verdict = "not tried"
            says = outcome.reason.removeprefix(f"{TRIED}: ").removeprefix(f"{TRIED}, ")
        print(json.dumps(asdict(_trial(name, verdict, says, time.monotonic() - begun))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
