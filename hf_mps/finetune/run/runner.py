"""Runs a recipe, from the rows to the files of the run, and turns a failure into one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_mps.core import notices, settings, status
from hf_mps.core.errors import INTERRUPTED, RunError, UserError
from hf_mps.distributed.ranks import Ranks
from hf_mps.finetune import report
from hf_mps.finetune.features import arguments
from hf_mps.finetune.features.machine import MemoryAdjustments, awake
from hf_mps.finetune.recipe import expect
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.report import screen
from hf_mps.finetune.run import failures, processes, stages
from hf_mps.finetune.run.logging import no_bars
from hf_mps.finetune.run.run_dir import RunDir, checkpoints, store
from hf_mps.finetune.smoke import files_stay, keep, smoke_recipe
from hf_mps.layer.activation import activate
from hf_mps.layer.guards import resume

Fit = Callable[[stages.PreparedRun], MemoryAdjustments]
"""How a run is made to fit the machine: by `hf_mps.tools.dryrun.memory.adjust`, which prepares runs itself."""


class Interrupted(RunError):
    """Ctrl-C or SIGTERM, with the checkpoints that are kept. Exits as a shell reports the signal, 130 or 143."""

    def __init__(self, words: str, exit_code: int = INTERRUPTED) -> None:
        super().__init__(words)
        self.exit_code = exit_code


def run(resolved: ResolvedRecipe, fit: Fit, *, fresh: bool = False, smoke: bool = False) -> dict[str, Any]:
    """Run a recipe, and return what its results.json says.

    An unfinished run of the same recipe resumes; a finished one is not repeated, and its outcome is printed. `fresh`
    trains anew beside it. `smoke` trains a tiny model of the same architecture on generated rows, in a folder that is
    gone afterwards unless `output_dir` names one. Prints a header, step lines and a closing table on stdout. Raises
    UserError for what the user gave, RunError for a failed run (a full disk, a NaN loss, a missed `expect`), both of
    one line.
    """
    settings.refuse_unknown()
    if not smoke:
        return train(resolved, fit, fresh=fresh)

    with _loading(resolved):
        activate.activate()
        with smoke_recipe(resolved) as small:
            results = train(small, fit, keep=False)
            if files_stay(small):
                Ranks.here().from_main(lambda: keep(small))
    if not files_stay(small):
        print("smoke run ended well; its files are gone (output_dir=PATH keeps them)")
    return results


def train(resolved: ResolvedRecipe, fit: Fit, *, fresh: bool = False, keep: bool = True) -> dict[str, Any]:
    """Run a recipe as `run` does; without `keep` it is not stored, so that nothing resumes the run."""
    ranks = Ranks.here()
    source, run_dir = stages.locate(resolved, fresh=fresh)
    if run_dir.finished:
        file = run_dir.path / failures.RESULTS
        results: dict[str, Any] = ranks.from_main(lambda: json.loads(file.read_text(encoding="utf-8")))
        (run_dir.path / failures.PENDING).unlink(missing_ok=True)  # of a run that was killed as it removed it
        metric, value = results["main_metric"], results["metrics"].get(results["main_metric"])
        scored = f" ({metric} {value:.4f})" if value is not None else ""
        again = resolved.command("finetune", "--fresh")
        print(f"{run_dir.path} holds this recipe's finished run{scored}; to train again beside it: {again}")
        _judge(results, run_dir.path)
        return results
    if resolved.smoke is None:
        ranks.from_main(source.refuse_absent)
    # Before the rows and the model are read, which can take minutes; `lock` checks again.
    ranks.from_main(run_dir.refuse_held)

    with _loading(resolved), no_bars(), awake(), notices.redirected(screen.note), ExitStack() as held:
        activate.activate()
        resume.arm_everywhere()
        with _failures_in_one_line(resolved, None):
            # The first rank of each host fills the caches of rows and models, and the others find its files.
            prepared_run = ranks.main_first(lambda: stages.prepare_run(resolved, source, run_dir))
            if prepared_run.prepared.before_training is not None:
                prepared_run.prepared.before_training()
            # Before the folder is there: a row that cannot be read leaves no trace.
            splits = prepared_run.splits if keep else {}
            if prepared_run.device.value == "mps" and resolved.smoke is None:  # a tiny model fits any machine
                adjustments = ranks.from_main(lambda: fit(prepared_run))
                prepared_run = replace(prepared_run, adjustments=adjustments)
        # Only the main rank locks: the others would find its lock and take it for another run.
        locked = ranks.from_main(lambda: held.enter_context(run_dir.lock()))
        run_dir = held.enter_context(processes.own_folder(locked, resolved))
        with failures.workers_ended(), _failures_in_one_line(resolved, run_dir, prepared_run.training):
            store_again = partial(store, run_dir.path, resolved, splits) if keep else (lambda: None)
            processes.by_writers(run_dir, store_again)
            if run_dir.pending:
                record = stages.finish_report(prepared_run, run_dir)
            else:
                record = stages.run_stages(prepared_run, run_dir, store_again)

    results = report.results(record)
    _judge(results, run_dir.path)
    return results


def _loading(resolved: ResolvedRecipe) -> AbstractContextManager[None]:
    """Show what is being loaded until the header appears; a smoke run's own part is inside the recipe's."""
    words = "loading PyTorch, the rows and the model …"
    return status.shown(words, log="" if resolved.smoke else f"{resolved.name}: {words}")


def _judge(results: dict[str, Any], output: Path) -> None:
    """Raise RunError where the run missed what the recipe promises."""
    promised = results["expectation"]
    if promised is not None and not promised["met"]:
        came = results["metrics"][promised["metric"]]
        raise RunError(f"expected {expect.Expectation(**promised)}, with {came:.4f}; the model is in {output}")


@contextmanager
def _failures_in_one_line(
    resolved: ResolvedRecipe, run_dir: RunDir | None, training: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Turn Ctrl-C and a failure of the machine into one line that names the kept checkpoints.

    `training` are a prepared run's own arguments.

    Half-written files are removed, and the run's folder too where nothing is left inside.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        code, step = getattr(error, "exit_code", INTERRUPTED), getattr(error, "step", None)
        kept_files = _kept_clause(run_dir)
        way_on = f"; to go on: {resolved.command('finetune')}" if "kept:" in kept_files else ""
        at = f" at step {step}" if step is not None else ""
        raise Interrupted(f"interrupted{at}{kept_files}{way_on}", code) from error
    except RunError as error:
        if error.quiet:
            raise
        raise RunError(f"{error}{_kept_clause(run_dir)}") from error
    except UserError:
        _kept_clause(run_dir)
        raise
    except Exception as error:
        kept_files, words = _kept_clause(run_dir), failures.describe(error) or failures.killed_worker(error)
        if words is None:
            raise
        if run_dir is None:
            raise RunError(f"{words}{failures.place_of_cache(error)}") from error
        if Ranks.here().world.alone:  # several processes have a launcher's command
            kept_files += failures.way_on(error, resolved, partial(arguments.smaller, training or {}))
        raise RunError(f"{words}{kept_files}") from error


def _kept_clause(run_dir: RunDir | None) -> str:
    """Return a clause about what a failed run leaves, once its folder is clean; empty before it has one.

    The folder is its writing process's to clean, and no other rank's that may still write.
    """
    if run_dir is None:
        return ""
    whole = run_dir.clean() if run_dir.writes else checkpoints(run_dir.path)
    model = f"; the trained model is in {run_dir.path}" if run_dir.holds_model() else ""
    if not whole:
        return model or "; no checkpoint was written yet"
    return f"{model}; kept: {', '.join(map(str, whole))}"
