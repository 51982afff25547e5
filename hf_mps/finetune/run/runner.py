"""Runs a recipe: rows, features, plan, training, and the files that it leaves."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps import fallback
from hf_mps.core import notices, settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import INTERRUPTED, RunError, UserError
from hf_mps.core.muted_warnings import ignoring
from hf_mps.finetune import tasks
from hf_mps.finetune.data import load
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe import expect, training_section
from hf_mps.finetune.recipe import resolve as orders
from hf_mps.finetune.recipe.resolve import Order
from hf_mps.finetune.report import screen
from hf_mps.finetune.run import failures, fingerprints, run_dir, stored_recipe

if TYPE_CHECKING:
    from hf_mps.finetune.data.rows import Rows
    from hf_mps.finetune.report import RunRecord
    from hf_mps.finetune.run.plan import Plan
    from hf_mps.finetune.tasks._base import Prepared


# Names that would make the header's first column wider than all others do.
SHORT_NAMES = {"logging_nan_inf_filter": "NaN filter"}


class Interrupted(RunError):
    """A Ctrl-C or SIGTERM, told with the checkpoints that are kept. Exits as a shell reports the signal, 130 or 143."""

    def __init__(self, words: str, exit_code: int = INTERRUPTED) -> None:
        super().__init__(words)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Planned:
    """All that is known before a training: the task's part and the plan, made of a recipe that was found possible."""

    order: Order
    prepared: Prepared
    plan: Plan


def run(name: str, overrides: Sequence[str] = (), *, fresh: bool = False, smoke: bool = False) -> dict[str, Any]:
    """Run the recipe called `name` with `overrides` laid over it, and return what its results.json says.

    An unfinished run of the same recipe is gone on with; a finished one is told of and not repeated. `fresh` trains
    anew beside it. `smoke` trains a tiny model of the same architecture on generated rows, in a folder that is gone
    afterwards unless `output_dir` names one. Prints a header, step lines and a closing table on stdout. Raises
    UserError for what the user gave, RunError for a failed run (a full disk, a loss that is no number, a missed
    `expect`), both of one line.
    """
    settings.refuse_unknown()
    order = orders.load(name, overrides)
    if smoke:
        from hf_mps.activation import activate
        from hf_mps.finetune import smoke as smokes

        with _loading(order):
            activate.activate()
            with smokes.order(order) as small:
                results = train(small, keep=False)
        if not smokes.kept(small):
            print("smoke run ended well; its files are gone (output_dir=PATH keeps them)")
        return results
    return train(order, fresh=fresh)


def train(order: Order, *, fresh: bool = False, keep: bool = True) -> dict[str, Any]:
    """Run `order` as `run` does; without `keep` the recipe is not stored, so that nothing goes on with the run."""
    load.check(order.recipe.data)
    source = checkpoint.resolve(order.recipe.model)
    place = run_dir.choose(order, fresh=fresh)
    if place.finished:
        return _finished(order, place)
    from hf_mps.activation import activate
    from hf_mps.finetune.run import caffeinate
    from hf_mps.finetune.run.logging import no_bars

    with _loading(order), no_bars(), caffeinate.held(), notices.told(screen.note), ExitStack() as held:
        activate.activate()
        with _told(order, None):
            device, prepared, rows = prepare(order, source)
            splits = fingerprints.of(rows) if keep else {}
            run_dir.refuse_other_rows(place, splits)
        output = held.enter_context(run_dir.claimed(place))
        with _told(order, output):
            if keep:
                stored_recipe.store(output, order)
                fingerprints.store(output, order.recipe.data, splits)
            record = _train(plan(order, device, prepared, output, place), place, output)
    from hf_mps.finetune import report

    results = report.results(record)
    _judge(results, output)
    return results


def prepare(order: Order, source: checkpoint.Checkpoint) -> tuple[Choice[str], Prepared, Mapping[str, Rows]]:
    """The device, the task's part and the rows: all that can be refused before a folder is made."""
    from transformers import set_seed

    from hf_mps.finetune.run import checks, plan
    from hf_mps.finetune.text import tokens

    device = plan.device(order.recipe)
    checks.refuse_impossible(order.recipe.training, device.value)
    checks.refuse_another_type(order.recipe.model_type, source)
    checks.refuse_caches()
    task = tasks.module(order.recipe.task)
    set_seed(order.recipe.seed)  # the new layers of the model are drawn while it is loaded
    status.now("reading the rows …")
    rows = load.load(order.recipe.data, order.recipe.seed)
    status.now("preparing the model and its features …")
    prepared = task.prepare(order.recipe, rows, source, device.value)
    checks.refuse_unknown_operators(order.recipe.fallback)
    load.refuse_unread(rows, (*load.SPLITS, *prepared.further), order.recipe.task)
    expect.refuse_unmeasured(order, prepared.reported)
    sizes = " + ".join(f"{len(one.dataset)}" for one in rows.values())
    where = "; ".join(f"{split}: {one.told}" for split, one in rows.items())
    prepared.choices = {"data": Choice(f"{sizes} rows", where), **tokens.unknown(prepared), **prepared.choices}
    return device, prepared, rows


def plan(order: Order, device: Choice[str], prepared: Prepared, output: Path, place: run_dir.Place) -> Planned:
    """Everything that a run in `output` would do, of what `prepare` returned."""
    from hf_mps.finetune.run import caffeinate
    from hf_mps.finetune.run import plan as plans

    made = plans.decide(order.recipe, prepared, device, Choice(output, place.reason))
    if order.smoke is not None:
        from hf_mps.finetune import smoke

        made.choices["smoke"] = order.smoke
        smoke.reasons(order, made.choices)
    if order.recipe.fallback and device.value == "mps":
        named = ", ".join(order.recipe.fallback)
        made.choices["on_the_cpu"] = Choice(named, "they have no Metal kernel, and the recipe names them: no warning")
    if (sleep := caffeinate.decide()) is not None:
        made.choices["sleep"] = sleep
    return Planned(order, prepared, made)


def _train(planned: Planned, place: run_dir.Place, output: Path) -> RunRecord:
    """Train, save, measure and report: what costs hours is on the disk before anything is made of it."""
    from hf_mps.finetune import report
    from hf_mps.finetune.run import predictions
    from hf_mps.finetune.run import record as records
    from hf_mps.finetune.run import train as training
    from hf_mps.finetune.run.callbacks import Stopwatch

    order, prepared, plan = planned.order, planned.prepared, planned.plan
    watch = Stopwatch()
    trainer = training.make(plan, prepared, watch, order.recipe.early_stopping_patience)
    header(order, plan)

    def keep() -> None:
        if prepared.save is not None:
            prepared.save(trainer, run_dir.staging(output))
        else:
            trainer.save_model(str(run_dir.staging(output)))
        run_dir.publish(output)

    with _named(order.recipe.fallback):
        trained = training.train(plan, prepared, trainer, watch, place.checkpoint, keep)
    record = records.make(order, plan, prepared, trained)
    files = report.write(output, record, lambda: predictions.write(output, prepared, trainer))
    _table(order, record, [output, *files])
    return record


def _loading(order: Order) -> AbstractContextManager[None]:
    """What stands on the screen until the header does; a smoke run's own part of it is inside the recipe's."""
    words = "loading PyTorch, the rows and the model …"
    return status.shown(words, log="" if order.smoke else f"{order.name}: {words}")


@contextmanager
def _named(operators: Sequence[str]) -> Iterator[None]:
    """Let no warning be shown of operators that the recipe names; the ledger counts them all the same."""
    from hf_mps.fallback.warnings import MetalFallbackWarning

    with ExitStack() as ignored:
        for operator in operators:
            ignored.enter_context(ignoring(MetalFallbackWarning, re.escape(f"hf_mps: {operator} of ")))
        yield


def header(order: Order, plan: Plan, verb: str = "finetune") -> None:
    """Print what was decided, each with its reason."""
    words = {"True": "on", "False": "off"}
    rows = []
    for name, choice in plan.shown().items():
        value = str(choice.value)
        rows.append((SHORT_NAMES.get(name, name.replace("_", " ")), words.get(value, value), choice.reason))
    if order.recipe.expect:
        rows.append(("expected", expect.in_words(order), expect.applies(order).reason))
    screen.header(rows, title=f"hf_mps {verb} {order.name}")


def _table(order: Order, record: RunRecord, files: Sequence[Path]) -> None:
    """Print how the run ended, with the files that stay, its folder first, and the command that gives it to the hub."""
    notes = [("device", "simulated: time and memory say nothing about a Mac")] if record.simulated else []
    if record.fallback:
        names = [entry["operator"] for entry in record.fallback]
        needed = [name for name in names if name not in record.unexpected_fallback]
        notes += [("on the CPU", f"{', '.join(needed)}, as the recipe names them")] if needed else []
        notes += [("unexpected", f"{', '.join(record.unexpected_fallback)} ran on the CPU")] if needed != names else []
        fallback.mark_reported()
    if order.smoke is None:
        notes.append(("to share", training_section.UPLOAD.format(shlex.quote(str(files[0])))))
    else:
        from hf_mps.finetune import smoke

        files = files if smoke.kept(order) else ()
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


def _finished(order: Order, place: run_dir.Place) -> dict[str, Any]:
    """Tell of a run that is done already, as it ended. Raises RunError where it missed what the recipe expects."""
    results: dict[str, Any] = json.loads((place.path / failures.RESULTS).read_text(encoding="utf-8"))
    metric, value = results["main_metric"], results["metrics"].get(results["main_metric"])
    scored = f" ({metric} {value:.4f})" if value is not None else ""
    again = shlex.join(["hf-mps", "finetune", *order.words, "--fresh"])
    print(f"{place.path} holds this recipe's finished run{scored}; to train again beside it: {again}")
    _judge(results, place.path)
    return results


def _judge(results: dict[str, Any], output: Path) -> None:
    """Raise RunError where the run missed what the recipe promises."""
    from hf_mps.finetune.report import Expectation

    promised = results["expectation"]
    if promised is not None and not promised["met"]:
        came = results["metrics"][promised["metric"]]
        raise RunError(f"expected {Expectation(**promised)}, with {came:.4f}; the model is in {output}")


@contextmanager
def _told(order: Order, output: Path | None) -> Iterator[None]:
    """Turn a Ctrl-C and a failure of the machine into one line that names the checkpoints which are kept.

    What was half-written is removed, and the run's folder with it where nothing is left inside.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        code, step = getattr(error, "exit_code", INTERRUPTED), getattr(error, "step", None)
        kept = _kept(output)
        on = f"; to go on: {shlex.join(['hf-mps', 'finetune', *order.words])}" if "kept:" in kept else ""
        raise Interrupted(f"interrupted{f' at step {step}' if step is not None else ''}{kept}{on}", code) from error
    except RunError as error:
        raise RunError(f"{error}{_kept(output)}") from error
    except UserError:
        _kept(output)
        raise
    except Exception as error:
        kept, words = _kept(output), failures.in_words(error)
        if words is None:
            raise
        raise RunError(f"{words}{failures.place_of_cache(error) if output is None else kept}") from error


def _kept(output: Path | None) -> str:
    if output is None:
        return ""
    whole = run_dir.tidy(output)
    model = f"; the trained model is in {output}" if run_dir.holds_model(output) else ""
    if not whole:
        return model or "; no checkpoint was written yet"
    return f"{model}; kept: {', '.join(map(str, whole))}"
