"""`--sweep`: one run for each combination of a few values, one after the other, and a table that compares them."""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_mps.core import checkpoint_files
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import write_atomic, write_json
from hf_mps.core.text import counted
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.report import predictions, screen
from hf_mps.finetune.run import failures, runner
from hf_mps.finetune.run.run_dir import RUNS, RunDir, next_free, numbered
from hf_mps.metal.device import memory
from hf_mps.metal.device.machine import SIMULATED

SEED = "seed"
# Runs of other seeds are compared on the same held-out rows.
SPLIT_SEED = "data.split_seed"
TABLE = "sweep.json"
# Letters of a folder's name.
LONGEST = 120


@dataclass
class SweepRun:
    """A run of a sweep: its values by key, as they were typed, its folder, and how it ended.

    `metrics` are those of results.json, empty where the run failed; `error` is the line that says why. `seconds` are no
    Mac's where `simulated`.
    """

    values: dict[str, str]
    resolved: ResolvedRecipe
    folder: Path
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    simulated: bool | None = None
    error: str = ""

    @property
    def words(self) -> str:
        """Return the values as command-line words."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass
class Sweep:
    """All runs of a sweep, and the metric that compares them, known once one has ended."""

    name: str
    folder: Path
    words: tuple[str, ...]
    runs: list[SweepRun]
    main_metric: str = ""
    greater_is_better: bool = True

    def groups(self) -> list[tuple[dict[str, str], list[SweepRun]]]:
        """Return the runs that differ by their seed alone, together, without failed ones."""
        found: dict[tuple[tuple[str, str], ...], list[SweepRun]] = {}
        for one in self.runs:
            alike = found.setdefault(tuple((key, value) for key, value in one.values.items() if key != SEED), [])
            alike += [one] if one.metrics else []
        return [(dict(key), runs) for key, runs in found.items()]


def run_sweep(resolved: ResolvedRecipe, axes: Sequence[str], fit: runner.Fit, *, fresh: bool = False) -> Sweep:
    """Run a recipe once for each combination of `axes` (`seed=1,2,3`), and return the outcome.

    Runs are in `runs/NAME-sweep/VALUES` (or below output_dir), with sweep.csv and sweep.json beside them. The same
    values, or more, continue the sweep that is there; other values leave its table as it is and get a folder beside it.
    One run's failure does not stop the others. Raises UserError, before the first run, for impossible axes and recipes;
    RunError at the end where a run failed.
    """
    sweep = Ranks.here().from_main(lambda: plan_sweep(resolved, axes, fresh=fresh))
    for number, one in enumerate(sweep.runs, start=1):
        print(f"run {number} of {len(sweep.runs)}: {one.words}")
        with _noted(sweep, one):
            _keep(sweep, one, runner.train(one.resolved, fit))
        write(sweep)
        import torch

        # The next run needs this one's memory.
        memory.release("mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "cpu")
    _table(sweep)

    def refuse_failed() -> None:
        if failed := [one for one in sweep.runs if one.error]:
            first = f"first {failed[0].words}: {failed[0].error}"
            raise RunError(f"{len(failed)} of {len(sweep.runs)} runs failed, {first}")

    Ranks.here().run_on_all(refuse_failed)
    return sweep


def plan_sweep(resolved: ResolvedRecipe, axes: Sequence[str], *, fresh: bool = False) -> Sweep:
    """Return the runs of a sweep, each validated, none begun. Raises UserError for the first invalid one."""
    keys = set(resolved.overrides)
    values: dict[str, list[str]] = {}
    for axis in axes:
        key, equals, text = axis.partition("=")
        if not equals or not key:
            raise UserError(f"--sweep '{axis}' has no values; allowed: KEY=VALUE,VALUE, for example seed=1,2,3")
        if resolved.in_full(key) in keys:
            raise UserError(f"--sweep {key} is given twice; give it once")
        if key == "output_dir":
            raise UserError("--sweep output_dir: every run gets its own folder below it; give output_dir=PATH")
        keys.add(resolved.in_full(key))
        values[key] = list(dict.fromkeys(_split(text)))
    every = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    parsed = [resolved.parse([f"{key}={value}" for key, value in of_run.items()]) for of_run in every]
    for typed in parsed:  # an impossible value is told of before the folder's
        resolved.with_overrides(typed)
    again = shlex.join(["hf-mps", "finetune", *resolved.words, "--fresh", "--sweep", *axes])
    base, data = _base(resolved, every, again, fresh=fresh), resolved.recipe.data
    draws = data.split_seed is None and bool(data.hold_out or data.rows.validation)
    runs: list[SweepRun] = []
    for values_of_run, typed in zip(every, parsed, strict=True):
        folder = base / _name(values_of_run, {run.folder.name.casefold() for run in runs})
        same_rows = {SPLIT_SEED: resolved.recipe.seed} if SEED in typed and draws else {}
        recipe = resolved.with_overrides({**same_rows, **typed, "output_dir": str(folder)})
        # Refuses a folder that holds the run of another recipe, before the first run begins.
        RunDir.choose(recipe, way_on=again)
        runs.append(SweepRun(values_of_run, recipe, folder))
    return Sweep(resolved.name, base, (*resolved.words, "--sweep", *axes), runs)


def _base(resolved: ResolvedRecipe, every: Sequence[dict[str, str]], again: str, *, fresh: bool) -> Path:
    """Return the folder of a sweep over the combinations `every`: that of the sweep to continue, or an unused one.

    Raises UserError, with the command `again`, for a folder that the user named and that holds another sweep.
    """
    named = resolved.recipe.output_dir
    first = Path(named).expanduser() if named else RUNS / f"{resolved.name}-sweep"
    if not first.exists():
        return first
    for path in [] if fresh else [first] if named else reversed(numbered(first)):
        if all(values in every for values in _swept(path)):
            return path
    if named and not fresh:
        shown = "; ".join(" ".join(f"{key}={value}" for key, value in values.items()) for values in _swept(first)[:4])
        raise UserError(f"output_dir {first} holds a sweep of other values ({shown}); next: {again}")
    return next_free(first)


def _swept(path: Path) -> list[dict[str, str]]:
    """Return the combinations of the sweep in a folder, none where its table was not written."""
    try:
        return [one["values"] for one in json.loads((path / TABLE).read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write(sweep: Sweep) -> list[Path]:
    """Write sweep.csv, a row for each run, and sweep.json, which has the means over seeds too; return their paths.

    The main process writes for all.
    """
    if not World.here().main:
        return []
    rows, runs = [], []
    for run in sweep.runs:
        state = "failed" if run.error else "finished" if run.metrics else "not run"
        of_run = {"train_seconds": run.seconds, "simulated": run.simulated, "error": run.error}
        rows.append({**run.values, "state": state, **run.metrics, **of_run})
        told = {"values": run.values, "folder": str(run.folder), "state": state, "metrics": run.metrics}
        runs.append(told | of_run | {"error": run.error or None})
    content = {
        "name": sweep.name,
        "main_metric": sweep.main_metric,
        "greater_is_better": sweep.greater_is_better,
        "runs": runs,
        "groups": [
            {"values": values, "runs": len(runs), "metrics": {name: _spread(runs, name) for name in _metrics(sweep)}}
            for values, runs in sweep.groups()
        ],
    }
    sweep.folder.mkdir(parents=True, exist_ok=True)
    checkpoint_files.sweep(sweep.folder)  # half a table of a process that was killed
    return [write_atomic(sweep.folder / "sweep.csv", predictions.text(rows)), write_json(sweep.folder / TABLE, content)]


@contextmanager
def _noted(sweep: Sweep, run: SweepRun) -> Iterator[None]:
    """Note a run's failure and let the next one begin; Ctrl-C ends the sweep with the command that resumes it."""
    try:
        yield
    except runner.Interrupted as error:
        write(sweep)
        way_on = shlex.join(["hf-mps", "finetune", *sweep.words])
        done = sum(bool(other.metrics) for other in sweep.runs)
        words = f"interrupted after {done} of {len(sweep.runs)} runs; to go on: {way_on}"
        raise runner.Interrupted(words, error.exit_code) from error
    except (RunError, UserError) as error:
        run.error = str(error)
        results = run.folder / failures.RESULTS
        if results.is_file():  # a run that ended and missed what its recipe expects
            _keep(sweep, run, json.loads(results.read_text(encoding="utf-8")))
        print(f"run failed: {error}")


def _keep(sweep: Sweep, run: SweepRun, results: dict[str, Any]) -> None:
    run.metrics, run.seconds = dict(results["metrics"]), results["train_seconds"]
    run.simulated = results.get("simulated")  # an earlier release left it out
    sweep.main_metric, sweep.greater_is_better = results["main_metric"], results["greater_is_better"]


def _metrics(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(name for one in sweep.runs for name in one.metrics))


def _spread(runs: Sequence[SweepRun], name: str) -> dict[str, float | None]:
    """Return mean and standard deviation (of a sample, n - 1) of a metric; None where there are too few values."""
    numbers = [one.metrics[name] for one in runs if one.metrics.get(name) is not None]
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return {"mean": statistics.fmean(numbers) if numbers else None, "deviation": deviation}


def _table(sweep: Sweep) -> None:
    """Print the groups with mean and deviation of each metric, the best one marked."""
    names, groups = _metrics(sweep), sweep.groups()
    scores = [_spread(runs, sweep.main_metric)["mean"] for _, runs in groups]
    known = [score for score in scores if score is not None]
    best = (max if sweep.greater_is_better else min)(known) if known else None
    keys = list(groups[0][0]) if groups else []
    heads = [*(keys or ["recipe"]), "runs", *names]
    rows = []
    for (values, runs), score in zip(groups, scores, strict=True):
        cells = list(values.values()) or [sweep.name]
        rows.append([*cells, str(len(runs)), *(_cell(runs, name) for name in names)])
        if score is not None and score == best and min(known) < max(known):
            rows[-1].append("best")
    simulated = SIMULATED if any(one.simulated for one in sweep.runs) else ""
    title = f"hf_mps sweep of {sweep.name}: {counted(len(sweep.runs), 'run')}{simulated}"
    screen.comparison(title, heads, rows, [str(path) for path in write(sweep)])


def _cell(runs: Sequence[SweepRun], name: str) -> str:
    found = _spread(runs, name)
    if found["mean"] is None:
        return "failed"
    return f"{found['mean']:.4f}" + (f" ± {found['deviation']:.4f}" if found["deviation"] is not None else "")


def _split(text: str) -> list[str]:
    """Return the values between commas; those inside brackets, braces or quotes belong to one value."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            values.append("")
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        values[-1] += letter
    if not all(value.strip() for value in values):
        raise UserError(f"--sweep '{text}' has an empty value between commas; allowed: VALUE,VALUE")
    return [value.strip() for value in values]


def _name(values: dict[str, str], taken: set[str]) -> str:
    """Return a folder name for a combination: `learning_rate=1e-5,seed=1`, in letters that every file system takes.

    It is none of those that are `taken`, in lower case: macOS's file system takes `a` and `A` for one name.
    """
    words = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
    name = "".join(letter if letter.isalnum() or letter in "=,.-_" else "_" for letter in words)
    # What tells two long combinations apart may be at their ends.
    digest = hashlib.blake2b(words.encode(), digest_size=4).hexdigest()
    return name if len(name) <= LONGEST and name.casefold() not in taken else f"{name[: LONGEST - 9]}-{digest}"
