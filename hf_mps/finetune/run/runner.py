"""Runs a recipe, from the rows to the files of the run, and turns a failure into one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps import fallback, kernels
from hf_mps.core import notices, settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import INTERRUPTED, RunError, UserError
from hf_mps.core.notices import ignoring
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune import capture
from hf_mps.finetune.recipe import expect, training_section
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.report import screen
from hf_mps.finetune.run import apart, batches, caffeinate, failures, fingerprints, links, workers
from hf_mps.finetune.run.prepare import PreparedRun, locate, prepare_run
from hf_mps.finetune.run.run_dir import RunDir, checkpoints, store
from hf_mps.guards import resume

if TYPE_CHECKING:
    from hf_mps.finetune.report import RunRecord
    from hf_mps.finetune.run.plan import Plan
    from hf_mps.finetune.run.room import Foresee

# Names that would make the header's first column wider than all others do.
SHORT_NAMES = {"logging_nan_inf_filter": "NaN filter"}


class Interrupted(RunError):
    """Ctrl-C or SIGTERM, with the checkpoints that are kept. Exits as a shell reports the signal, 130 or 143."""

    def __init__(self, words: str, exit_code: int = INTERRUPTED) -> None:
        super().__init__(words)
        self.exit_code = exit_code


def run(
    resolved: ResolvedRecipe, *, fresh: bool = False, smoke: bool = False, foresee: Foresee | None = None
) -> dict[str, Any]:
    """Run a recipe, and return what its results.json says.

    An unfinished run of the same recipe resumes; a finished one is not repeated, and its outcome is printed. `fresh`
    trains anew beside it. `smoke` trains a tiny model of the same architecture on generated rows, in a folder that is
    gone afterwards unless `output_dir` names one. `foresee` says what makes the steps fit the machine. Prints a header,
    step lines and a closing table on stdout. Raises UserError for what the user gave, RunError for a failed run (a full
    disk, a NaN loss, a missed `expect`), both of one line.
    """
    settings.refuse_unknown()
    if not smoke:
        return train(resolved, fresh=fresh, foresee=foresee)
    from hf_mps.activation import activate
    from hf_mps.finetune.smoke import files_stay, smoke_recipe

    with _loading(resolved):
        activate.activate()
        with smoke_recipe(resolved) as small:
            results = train(small, keep=False)
    if not files_stay(small):
        print("smoke run ended well; its files are gone (output_dir=PATH keeps them)")
    return results


def train(
    resolved: ResolvedRecipe, *, fresh: bool = False, keep: bool = True, foresee: Foresee | None = None
) -> dict[str, Any]:
    """Run a recipe as `run` does; without `keep` it is not stored, so that nothing resumes the run."""
    ranks = Ranks.here()
    source, run_dir = locate(resolved, fresh=fresh)
    if run_dir.finished:
        return _finished(resolved, run_dir)
    ranks.from_main(run_dir.refuse_held)
    from hf_mps.activation import activate
    from hf_mps.finetune.run.logging import no_bars

    with _loading(resolved), no_bars(), caffeinate.awake(), notices.told(screen.note), ExitStack() as held:
        activate.activate()
        resume.arm_everywhere()
        with _failures_in_one_line(resolved, None):
            prepared_run = ranks.main_first(lambda: prepare_run(resolved, source, run_dir))
            if prepared_run.prepared.before_training is not None:
                prepared_run.prepared.before_training()
            splits = prepared_run.splits if keep else {}
            if foresee is not None:
                room = ranks.from_main(lambda: foresee(prepared_run))
                prepared_run = replace(prepared_run, room=room)
        locked = ranks.from_main(lambda: held.enter_context(run_dir.lock()))
        run_dir = held.enter_context(apart.at_hand(locked))
        if ranks.watch is not None:
            ranks.watch.left = lambda: _kept_clause(run_dir, clean=False)
        with workers.ended(), _failures_in_one_line(resolved, run_dir):
            if keep and ranks.world.main:
                _store(run_dir, prepared_run, splits)
            if run_dir.pending:
                record = _finish(prepared_run, run_dir)
            else:
                record = _train(prepared_run, run_dir, lambda: _store(run_dir, prepared_run, splits) if keep else None)
    from hf_mps.finetune import report

    results = report.results(record)
    _judge(results, run_dir.path)
    return results


def _store(run_dir: RunDir, run: PreparedRun, splits: fingerprints.Splits) -> None:
    """Write into the run's folder what a later call knows it by."""
    store(run_dir.path, run.resolved)
    fingerprints.store(run_dir.path, run.resolved.recipe.data, splits)


def _train(run: PreparedRun, run_dir: RunDir, store_again: Callable[[], None]) -> RunRecord:
    """Train, save, measure and report; what took hours is stored before anything is made of it.

    `store_again` is called where the folder was deleted meanwhile.
    """
    from hf_mps.finetune import report
    from hf_mps.finetune.report import predictions
    from hf_mps.finetune.run import processes
    from hf_mps.finetune.run.callbacks import FolderKept, Stopwatch
    from hf_mps.finetune.run.record import make_record
    from hf_mps.finetune.run.train import make_trainer, train_and_measure

    recipe, prepared, watch = run.resolved.recipe, run.prepared, Stopwatch()
    ranks = Ranks.here()
    output = Choice(run_dir.path, run_dir.reason)
    plan = ranks.alike(lambda: processes.go_on(run.plan(output), run_dir.checkpoint, ranks.world.size))
    apart.refuse_parts(plan, run_dir)
    kept = capture.measured(plan, prepared, recipe, run_dir.checkpoint)
    capture.choose_kernels(plan, prepared, recipe)
    trainer = ranks.alike(lambda: make_trainer(plan, prepared, watch, recipe.early_stopping_patience))
    if ranks.world.main:
        trainer.add_callback(FolderKept(run_dir.staging, store_again))
    if kept is not None:
        trainer.add_callback(kept)
        watch.before = kept.seconds
    captured = capture.install(plan.choices, trainer, recipe.cuda_graphs)
    links.measure(trainer, plan.choices)
    if "batches" in plan.choices:
        from hf_mps.finetune.run import shares

        shares.install(trainer, prepared, plan.choices, run_dir.checkpoint)
    header(run.resolved, plan)
    keep = _keeping(trainer, prepared.save, run_dir)
    with expected_operators(recipe.fallback):
        trained = train_and_measure(plan, prepared, trainer, watch, run_dir.checkpoint, keep)
    if captured is not None:
        plan.choices[capture.KEY] = captured.outcome()
        captured.close()
    record = make_record(run.resolved, plan, prepared, trained)
    if not ranks.world.main:
        predictions.take_part(prepared, trainer)
        return record
    files = report.write(run_dir.path, record, lambda: predictions.write(run_dir.path, prepared, trainer))
    _table(run.resolved, record, [run_dir.path, *files])
    return record


def _finish(run: PreparedRun, run_dir: RunDir) -> RunRecord:
    """Write the report of a run that was killed behind its training, from its record and the model in its folder."""
    from hf_mps.finetune import report
    from hf_mps.finetune.report import predictions
    from hf_mps.finetune.run.callbacks import Stopwatch
    from hf_mps.finetune.run.train import make_trainer

    ranks, record = Ranks.here(), Ranks.here().from_main(lambda: report.pending(run_dir.path))
    if ranks.world.main:
        run_dir.staging.rmdir()  # the model was moved out of it before the kill
        print(f"{run_dir.path}: the training has ended; the report is written from what it stored")
    plan = run.plan(Choice(run_dir.path, run_dir.reason))
    trainer = ranks.alike(lambda: make_trainer(plan, run.prepared, Stopwatch(), None))

    def answer() -> predictions.Written:
        trainer._load_from_checkpoint(str(run_dir.path))
        return predictions.write(run_dir.path, run.prepared, trainer)

    if ranks.world.main:
        # A host without the folder has no weights to predict its share with.
        files = report.write(run_dir.path, record, None if run_dir.without else answer)
        _table(run.resolved, record, [run_dir.path, *files])
    elif not run_dir.without:
        trainer._load_from_checkpoint(str(run_dir.path))
        predictions.take_part(run.prepared, trainer)
    return record


def _keeping(trainer: Any, save: Callable[[Any, Path], None] | None, run_dir: RunDir) -> Callable[[], None]:
    """Return what writes the trained model into the run's folder: called by every rank, by `save` of the task or whole.

    To be made before the training begins.
    """
    from hf_mps.finetune.sharding.engine import save_whole

    ranks, share_best = Ranks.here(), apart.best_for_all(trainer, run_dir)

    def keep() -> None:
        share_best()
        if trainer.is_fsdp_enabled:
            save_whole(trainer, run_dir.staging)
        elif save is not None:
            ranks.from_main(lambda: save(trainer, run_dir.staging))
        else:
            trainer.save_model(str(run_dir.staging))
        ranks.from_main(run_dir.publish)

    return keep


def _loading(resolved: ResolvedRecipe) -> AbstractContextManager[None]:
    """Show what is being loaded until the header appears; a smoke run's own part is inside the recipe's."""
    words = "loading PyTorch, the rows and the model …"
    return status.shown(words, log="" if resolved.smoke else f"{resolved.name}: {words}")


@contextmanager
def expected_operators(operators: Sequence[str]) -> Iterator[None]:
    """Suppress the warnings of operators that the recipe names; the ledger counts them all the same."""
    from hf_mps.fallback.warnings import MetalFallbackWarning

    with ExitStack() as ignored:
        for operator in operators:
            ignored.enter_context(ignoring(MetalFallbackWarning, re.escape(f"hf_mps: {operator} of ")))
        yield


def header(resolved: ResolvedRecipe, plan: Plan, verb: str = "finetune") -> None:
    """Print the decisions, each with its reason."""
    words = {"True": "on", "False": "off"}
    rows = []
    for name, choice in plan.shown().items():
        value = str(choice.value)
        rows.append((SHORT_NAMES.get(name, name.replace("_", " ")), words.get(value, value), choice.reason))
    if (recipe := resolved.recipe).expect:
        rows.append(("expected", expect.ranges(recipe), expect.applies(recipe, resolved.changed).reason))
    screen.header(rows, title=f"hf_mps {verb} {resolved.name}")


def _table(resolved: ResolvedRecipe, record: RunRecord, files: Sequence[Path]) -> None:
    """Print how the run ended, its folder and the files in it, and the command that uploads it to the hub."""
    notes = [("device", "simulated: time and memory say nothing about a Mac")] if record.simulated else []
    if (stream := record.stream) is not None:
        waited = f"{stream['waited_seconds']:.1f} s, {stream['waited_share']:.1%} of the training"
        broken = f"; {stream['rows_broken']:,} broken ones skipped" if stream["rows_broken"] else ""
        notes.append(("waited", f"{waited}, for batches; {stream['rows_read']:,} rows were read{broken}"))
    if record.metal_kernels is not None:
        notes.append(("kernels", str(record.metal_kernels)))
        kernels.coverage_is_said()
    if record.fallback:
        names = [entry["operator"] for entry in record.fallback]
        needed = [name for name in names if name not in record.unexpected_fallback]
        notes += [("on the CPU", f"{', '.join(needed)}, as the recipe names them")] if needed else []
        notes += [("unexpected", f"{', '.join(record.unexpected_fallback)} ran on the CPU")] if needed != names else []
        fallback.mark_reported()
    if resolved.smoke is None:
        notes.append(("to share", training_section.PUSH.format(shlex.quote(str(files[0])))))
    else:
        from hf_mps.finetune.smoke import files_stay

        files = files if files_stay(resolved) else ()
    screen.final_table(
        record.metrics,
        baseline=record.baseline.metrics if record.baseline else None,
        baseline_is=record.baseline.what if record.baseline else "",
        expectation=record.expectation,
        seconds=record.train_seconds,
        samples_per_second=record.samples_per_second,
        peak_memory=record.peak_memory,
        notes=notes,
        files=files,
    )


def _finished(resolved: ResolvedRecipe, run_dir: RunDir) -> dict[str, Any]:
    """Print how an already finished run ended. Raises RunError where it missed what the recipe expects."""
    results = Ranks.here().from_main(run_dir.results)
    metric, value = results["main_metric"], results["metrics"].get(results["main_metric"])
    scored = f" ({metric} {value:.4f})" if value is not None else ""
    again = resolved.command("finetune", "--fresh")
    print(f"{run_dir.path} holds this recipe's finished run{scored}; to train again beside it: {again}")
    _judge(results, run_dir.path)
    return results


def _judge(results: dict[str, Any], output: Path) -> None:
    """Raise RunError where the run missed what the recipe promises."""
    promised = results["expectation"]
    if promised is not None and not promised["met"]:
        came = results["metrics"][promised["metric"]]
        raise RunError(f"expected {expect.Expectation(**promised)}, with {came:.4f}; the model is in {output}")


@contextmanager
def _failures_in_one_line(resolved: ResolvedRecipe, run_dir: RunDir | None) -> Iterator[None]:
    """Turn Ctrl-C and a failure of the machine into one line that names the kept checkpoints.

    Half-written files are removed, and the run's folder too where nothing is left inside.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        code, step = getattr(error, "exit_code", INTERRUPTED), getattr(error, "step", None)
        kept_files = _kept_clause(run_dir)
        way_on = f"; to go on: {resolved.command('finetune')}" if "kept:" in kept_files else ""
        raise Interrupted(
            f"interrupted{f' at step {step}' if step is not None else ''}{kept_files}{way_on}", code
        ) from error
    except RunError as error:
        if error.quiet:
            raise
        raise RunError(f"{error}{_kept_clause(run_dir)}") from error
    except UserError:
        _kept_clause(run_dir)
        raise
    except Exception as error:
        kept_files, words = _kept_clause(run_dir), failures.describe(error) or workers.killed(error)
        if words is None:
            raise
        if run_dir is None:
            raise RunError(f"{words}{failures.place_of_cache(error)}") from error
        if World.here().alone:  # several processes have a launcher's command
            kept_files += failures.way_on(error, resolved, partial(batches.smaller, resolved.recipe))
        raise RunError(f"{words}{kept_files}") from error


def _kept_clause(run_dir: RunDir | None, *, clean: bool = True) -> str:
    """Return a clause about what a failed run leaves, once its folder is clean; empty before it has one.

    The folder is the main process's to clean, and no other rank's that may still write.
    """
    if run_dir is None:
        return ""
    if run_dir.host:
        return f"; what was saved is in {run_dir.path} on {run_dir.host}"
    whole = run_dir.clean() if clean and World.here().main else checkpoints(run_dir.path)
    model = f"; the trained model is in {run_dir.path}" if run_dir.holds_model() else ""
    if not whole:
        return model or "; no checkpoint was written yet"
    return f"{model}; kept: {', '.join(map(str, whole))}"
