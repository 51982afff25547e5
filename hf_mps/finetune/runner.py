"""Runs a recipe: rows, features, plan, transformers' Trainer, and the files that it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps import settings
from hf_mps.choice import Choice
from hf_mps.errors import INTERRUPTED, RunError, UserError
from hf_mps.finetune import batches, checkpoint, data, expect, failures, folder, progress, tasks
from hf_mps.finetune import order as orders
from hf_mps.finetune.order import Order

if TYPE_CHECKING:
    from hf_mps.finetune.plan import Plan
    from hf_mps.finetune.report import RunRecord
    from hf_mps.finetune.task import Prepared


class Interrupted(RunError):
    """A Ctrl-C, told with the checkpoints that are kept. Exit 130, as a shell reports it."""

    exit_code = INTERRUPTED


def run(name: str, overrides: Sequence[str] = ()) -> RunRecord:
    """Run the recipe called `name` with `overrides` laid over it, and return what its results.json says.

    Prints a header, step lines and a closing table on stdout. Raises UserError for what the user gave, RunError for a
    failed run (a full disk, a loss that is no number, a missed `expect`), both of one line.
    """
    settings.refuse_unknown()
    order = orders.load(name, overrides)
    data.check(order.recipe.data)
    source = checkpoint.resolve(order.recipe.model)
    where = folder.choose(order.name, order.recipe.output_dir)
    from hf_mps import activate
    from hf_mps.finetune.quiet import no_bars

    activate.activate()
    with no_bars():
        with _told(None):
            device, prepared = _prepare(order, source)
        output = folder.claim(where, named=order.recipe.output_dir is not None)
        with _told(output.value):
            record = _train(order, device, prepared, output)
    if record.expectation is not None and not record.expectation.met:
        came = record.metrics[record.expectation.metric]
        raise RunError(f"expected {record.expectation}, with {came:.4f}; the model is in {output.value}")
    return record


def _prepare(order: Order, source: checkpoint.Checkpoint) -> tuple[Choice[str], Prepared]:
    """The device and the task's part: all that can be refused before a folder is made."""
    from transformers import set_seed

    from hf_mps.finetune import plan

    device = plan.device(order.recipe)
    plan.refuse_impossible(order.recipe.training, device.value)
    task = tasks.module(order.recipe.task)
    set_seed(order.recipe.seed)  # the new layers of the model are drawn while it is loaded
    rows = data.load(order.recipe.data, task.columns(order.recipe), order.recipe.seed)
    prepared = task.prepare(order.recipe, rows, source, device.value)
    for split in rows:
        if split not in (*data.SPLITS, *prepared.further):
            raise UserError(f"data names a split {split}, and {order.recipe.task} reads train and validation alone")
    reported = prepared.metrics.reported
    further = (f"{split}_{metric}" for split in prepared.further for metric in reported)
    expect.refuse_unmeasured(order, (*reported, *further))
    sizes = " + ".join(f"{len(one.dataset)}" for one in rows.values())
    prepared.choices = {
        "data": Choice(f"{sizes} rows", "; ".join(f"{split}: {one.where}" for split, one in rows.items())),
        **prepared.choices,
    }
    return device, prepared


def _train(order: Order, device: Choice[str], prepared: Prepared, output: Choice[Path]) -> RunRecord:
    """Plan, train, measure, save and report."""
    from hf_mps.device.memory import Peak
    from hf_mps.finetune import plan as plans
    from hf_mps.finetune import record as records
    from hf_mps.finetune import report
    from hf_mps.finetune.callbacks import FiniteLoss, Stopwatch
    from hf_mps.finetune.interrupt import CtrlC

    plan = plans.decide(order.recipe, prepared, device, output)
    watch, peak, ctrl_c = Stopwatch(), Peak(device.value), CtrlC()
    trainer = _trainer(plan, prepared, [watch, FiniteLoss(), ctrl_c])
    _header(order, plan)
    lines = progress.StepLines(
        memory=lambda: (peak.sample(), peak.result.value),
        main_metric=prepared.metrics.main,
        greater_is_better=prepared.metrics.greater_is_better,
    )
    with peak, lines.attach(trainer), ctrl_c:
        trained = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        if not math.isfinite(trained.training_loss):
            raise RunError(f"the training loss is {trained.training_loss}; next: a lower training.learning_rate")
        measured = _measured(trainer) | _further(trainer, prepared)
    if prepared.save is not None:
        prepared.save(trainer, folder.staging(output.value))
    else:
        trainer.save_model(str(folder.staging(output.value)))
    folder.publish(output.value)
    record = records.make(order, plan, prepared, trainer, measured, watch, peak.result.value)
    files = report.write(output.value, record)
    _table(record, [output.value, *files])
    return record


def _trainer(plan: Plan, prepared: Prepared, callbacks: list[Any]) -> Any:
    """transformers' own Trainer, or the task's. Raises UserError for arguments that it refuses."""
    from transformers import Trainer, TrainingArguments

    try:
        arguments = (prepared.arguments or TrainingArguments)(**plan.arguments)
        trainer = (prepared.trainer or Trainer)(
            model=prepared.model,
            args=arguments,
            train_dataset=prepared.train,
            eval_dataset=prepared.validation,
            data_collator=prepared.collator,
            processing_class=prepared.processing_class,
            compute_metrics=prepared.compute_metrics,
            callbacks=callbacks,
            **prepared.trainer_settings,
        )
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"training: transformers refuses it: {str(error).strip().splitlines()[0]}") from error
    if plan.choices["sampling"].value == batches.ALIKE:
        batches.hang_into(trainer, prepared)
    if arguments.device.type != plan.device.value:
        raise RuntimeError(f"Trainer took {arguments.device.type} where the plan says {plan.device.value}")
    return trainer


def _header(order: Order, plan: Plan) -> None:
    words = {"True": "on", "False": "off"}
    rows = []
    for name, choice in plan.shown().items():
        value = str(choice.value)
        rows.append((name.replace("_", " "), words.get(value, value), choice.reason))
    if order.recipe.expect:
        rows.append(("expected", expect.in_words(order), expect.applies(order).reason))
    progress.header(rows, title=f"hf_mps finetune {order.name}")


def _table(record: RunRecord, files: Sequence[Path]) -> None:
    progress.final_table(
        record.metrics,
        baseline=record.baseline.metrics if record.baseline else None,
        baseline_is=record.baseline.what if record.baseline else "",
        expectation=record.expectation,
        seconds=record.train_seconds,
        samples_per_second=record.samples_per_second,
        peak_memory=record.peak_memory,
        files=files,
    )


def _measured(trainer: Any) -> dict[str, float]:
    """The metrics of the weights that are kept: of the evaluation that saw them, or of a new one."""
    state = trainer.state
    kept = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    for entry in reversed(state.log_history):
        if entry.get("step") == kept and "eval_loss" in entry:
            return dict(entry)
    return dict(trainer.evaluate())


def _further(trainer: Any, prepared: Prepared) -> dict[str, float]:
    """The metrics of the further splits, `mismatched_accuracy` for instance; without Trainer's times."""
    reported = (*prepared.metrics.reported, "loss")
    found: dict[str, float] = {}
    for split, features in prepared.further.items():
        measured = trainer.predict(features, metric_key_prefix=split).metrics
        found |= {f"{split}_{name}": measured[f"{split}_{name}"] for name in reported}
    return found


@contextmanager
def _told(output: Path | None) -> Iterator[None]:
    """Turn a Ctrl-C and a failure of the machine into one line that names the checkpoints which are kept.

    What was half-written is removed, and the run's folder with it where nothing is left inside.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted{_kept(output)}") from error
    except RunError as error:
        raise RunError(f"{error}{_kept(output)}") from error
    except UserError:
        _kept(output)
        raise
    except Exception as error:
        kept, words = _kept(output), failures.in_words(error)
        if words is None:
            raise
        raise RunError(f"{words}{kept}") from error


def _kept(output: Path | None) -> str:
    if output is None:
        return ""
    whole = folder.tidy(output)
    if not whole:
        return "; no checkpoint was written yet"
    return f"; kept: {', '.join(map(str, whole))}"
