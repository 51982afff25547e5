"""A run from its recipe to its report, in six stages: rows, task, plan, trainer, training, report.

Each stage is one function, in the order in which they run. `hf_mps.finetune.run.runner` calls them for a run,
`hf_mps.tools.dryrun` the first three or four of them for `--plan`, plan, audit and parity. A feature of a run is an
object in `hf_mps.finetune.features`: it decides in `make_plan`, acts in `make_trainer` and `train`, and is named in
none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps import metrics
from hf_mps.core import checkpoint_files, notices, settings, status
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.text import first_line
from hf_mps.distributed.metal.claim import claim
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune import tasks
from hf_mps.finetune.data import load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.features import FEATURES
from hf_mps.finetune.features.base import Draft, Plan
from hf_mps.finetune.features.machine import MemoryAdjustments
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import expect
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.report import pending, predictions, write
from hf_mps.finetune.run import checks, processes
from hf_mps.finetune.run.record import closing_table, header, make_record
from hf_mps.finetune.run.run_dir import RunDir, Splits, digest_rows
from hf_mps.finetune.run.trainer import recipe_trainer
from hf_mps.finetune.stream import pace
from hf_mps.finetune.tasks import Prepared
from hf_mps.finetune.text import tokens
from hf_mps.layer.guards import resume
from hf_mps.metal import kernels
from hf_mps.metal.device.memory import Peak

if TYPE_CHECKING:
    from hf_mps.finetune.report import RunRecord
    from hf_mps.finetune.run.callbacks import Stopwatch
    from hf_mps.metal.kernels.coverage import Coverage

# What the constructors of training arguments and trainers raise for options that do not go together.
REFUSALS = (ValueError, TypeError, ImportError)


@dataclass(frozen=True)
class PreparedRun:
    """All that is known of a run before its plan: a recipe that is possible on `device`, its rows and its model.

    `adjustments` is what it changes so that its steps fit the machine.
    """

    resolved: ResolvedRecipe
    device: Choice[str]
    prepared: Prepared
    rows: Mapping[str, Rows]
    adjustments: MemoryAdjustments = field(default_factory=MemoryAdjustments)

    @property
    def training(self) -> dict[str, Any]:
        """Return the training arguments that the task wants, memory asks for or the recipe says; the last one wins."""
        said = {key: value for key, value in self.resolved.recipe.training.items() if value is not None}
        return self.prepared.arguments_defaults | self.adjustments.training | said

    @cached_property
    def splits(self) -> Splits:
        """Return a digest of the rows of each split. Raises UserError for a file that cannot be read, with its row."""
        return digest_rows(self.rows)


@dataclass(frozen=True)
class Trained:
    """A finished training: its trainer, the metrics of the kept weights, its clock and its peak memory in bytes.

    `metal_kernels` is what ran with a release's own, None where none were asked for.
    """

    trainer: Any
    measured: dict[str, float]
    watch: Stopwatch
    peak: int
    metal_kernels: Coverage | None


# ---- the stages ----


def run_stages(run: PreparedRun, run_dir: RunDir, store_again: Callable[[], None]) -> RunRecord:
    """Plan, train and report a run whose rows and task are prepared (`prepare_run`); every rank does.

    The model is stored before its report is made. `store_again` is called where the folder was deleted.
    """
    from hf_mps.finetune.run.callbacks import FolderKept, Stopwatch

    ranks, watch, prepared = Ranks.here(), Stopwatch(), run.prepared
    output = Choice(run_dir.path, run_dir.reason)
    # What one rank refuses all refuse, in one line; without run_on_all the others would wait in the first collective.
    plan = ranks.run_on_all(lambda: processes.go_on(make_plan(run, output), run_dir.checkpoint, ranks.world.size))
    plan = ranks.run_on_all(lambda: processes.saved_on_each(plan, run_dir))
    # After `go_on`: what was measured when the run began holds for the rest of it.
    for feature in FEATURES:
        feature.try_out(plan, prepared, run_dir.checkpoint)
    trainer = ranks.run_on_all(lambda: make_trainer(plan, prepared, watch))
    if run_dir.writes:
        trainer.add_callback(FolderKept(run_dir.staging, store_again))
    header(run.resolved, plan, brief=True)
    trained = train(plan, prepared, trainer, watch, run_dir)
    record = make_record(run.resolved, plan, prepared, trained)
    report(run, record, trained.trainer, run_dir)
    return record


# ---- where a run starts from ----


def locate(resolved: ResolvedRecipe, *, fresh: bool = False) -> tuple[Checkpoint, RunDir]:
    """Return the checkpoint that a run starts from, and the folder that it writes to; neither is touched.

    Every rank has the checkpoint; the main one chooses the folder, for all of them.

    Raises UserError for missing files and folders, for what `RunDir.choose` refuses, and where the hosts' folders
    differ. Imports no torch.
    """
    ranks = Ranks.here()
    ranks.run_on_all(lambda: load.check(resolved.recipe.data))
    source = ranks.run_on_all(lambda: checkpoint.resolve(resolved.recipe.model))
    run_dir = ranks.from_main(lambda: RunDir.choose(resolved, fresh=fresh))
    processes.refuse_different(resolved, run_dir)
    return source, run_dir


def choose_device(recipe: Recipe) -> Choice[str]:
    """Return the device of a run: the layer's choice, or the CPU where the recipe says `use_cpu`. Imports torch.

    Raises UserError where HF_MPS_DEVICE and the recipe contradict each other.
    """
    import hf_mps.metal.device

    if recipe.training.get("use_cpu"):
        if (wanted := settings.device()) not in (None, "cpu"):
            told = f"training.use_cpu is true and HF_MPS_DEVICE={wanted} asks for another device"
            raise UserError(f"{told}; give one of them")
        return Choice("cpu", "training.use_cpu in the recipe")
    return kernels.told(hf_mps.metal.device.choose())


# ---- rows and task ----


def prepare_run(
    resolved: ResolvedRecipe, source: Checkpoint, run_dir: RunDir | None = None, *, device: Choice[str] | None = None
) -> PreparedRun:
    """Prepare a run of a recipe from the checkpoint `source` on `device` (default: its own choice).

    Without `run_dir` it is a single step to look at: nothing is measured, and what only a whole run refuses passes
    (unknown operators in `fallback`, metrics in `expect` and splits that are not measured, other rows than those of the
    run in `run_dir`). Imports torch and draws the new weights with the recipe's seed. Raises UserError.
    """
    from transformers import set_seed

    recipe, device = resolved.recipe, device or choose_device(resolved.recipe)
    checks.refuse_impossible(recipe.training, device.value)
    if device.value == "mps" and run_dir is not None:
        claim(World.here())  # before a rank waits for the others
    checks.refuse_early_stopping(recipe.training, recipe.early_stopping_patience)
    if recipe.data.streaming:
        pace.refuse_endless(recipe)
    checks.refuse_another_type(recipe.model_type, source)
    checks.refuse_caches()
    set_seed(recipe.seed)  # the new layers of the model are drawn while it is loaded
    if run_dir is not None:
        status.now("reading the rows …")
    rows = load.load(recipe.data, recipe.seed)
    if run_dir is not None:
        status.now("preparing the model and its features …")
    source = replace(source, dtype=recipe.weights)
    with metrics.unmeasured() if run_dir is None else nullcontext():
        prepared = tasks.find(recipe.task)(recipe, source, device.value).prepare(rows)
    run = PreparedRun(resolved, device, prepared, rows)
    if run_dir is not None:
        _check_whole(run, run_dir)
    return run


def _check_whole(run: PreparedRun, run_dir: RunDir) -> None:
    """Refuse what only a whole run refuses once rows and model are loaded; adds the choices about the rows."""
    recipe, prepared = run.resolved.recipe, run.prepared
    checks.refuse_unknown_operators(recipe.fallback)
    for split in run.rows:  # a task would load it in vain
        if split not in (*load.SPLITS, *prepared.further):
            told = f"data names a split {split}, which {recipe.task} does not measure"
            raise UserError(f"{told}; allowed: {', '.join(load.SPLITS)}")
    for text in expect.unmeasured(recipe, run.resolved.changed, prepared).values():
        raise UserError(text)
    run_dir.refuse_other_rows(run.splits)
    sizes = " + ".join(str(one.stream or len(one.dataset)) for one in run.rows.values())
    where = "; ".join(f"{split}: {one.origin}" for split, one in run.rows.items())
    prepared.choices = {"data": Choice(f"{sizes} rows", where), **tokens.unknown_tokens(prepared), **prepared.choices}


# ---- plan ----


def make_plan(run: PreparedRun, output: Choice[Path], device: Choice[str] | None = None) -> Plan:
    """Return everything that a run in the folder `output` would do on `device`, by default the run's own.

    Raises UserError for an option that the device cannot honour.
    """
    recipe, device, prepared = run.resolved.recipe, device or run.device, run.prepared
    draft = Draft(run.resolved, prepared, device.value, output, run.adjustments, run.training, dict(prepared.choices))
    for feature in FEATURES:
        feature.decide(draft)
    return Plan(recipe, device, draft.choices, draft.arguments | draft.training | draft.fixed)


# ---- trainer ----


def make_trainer(plan: Plan, prepared: Prepared, watch: Stopwatch) -> Any:
    """Return the trainer of a plan. Raises UserError for arguments that transformers refuses."""
    from hf_mps.finetune.report.examples import Examples
    from hf_mps.finetune.run.callbacks import FiniteLoss, MainStatistics, OwnDraws, Shares

    with ExitStack() as held:
        # Trainer prepares the model while it is made, so attention and sharding must be settled before.
        for feature in FEATURES:
            held.enter_context(feature.making(plan, prepared))
        args = training_arguments(plan, prepared)
        # Before the clock, which goes on behind an evaluation.
        shown = [Examples(prepared)] if plan.recipe.examples and prepared.task.shows and prepared.predict else []
        callbacks = [*shown, watch, FiniteLoss(), OwnDraws(), MainStatistics(), *prepared.callbacks, Shares.of(args)]
        parts = prepared.parts | {"compute_metrics": prepared.compute_metrics, "callbacks": callbacks}
        parts |= {"train_dataset": prepared.train, "eval_dataset": prepared.validation}
        with refusals_told():
            trainer = recipe_trainer(prepared.trainer)(args=args, **parts)
    for one in shown:
        one.trainer = trainer
    for feature in FEATURES:
        feature.apply(trainer, plan, prepared)
    if args.device.type != plan.device.value:
        raise RuntimeError(f"Trainer took {args.device.type} where the plan says {plan.device.value}")
    return trainer


def training_arguments(plan: Plan, prepared: Prepared) -> Any:
    """Return a plan's training arguments. Raises UserError for what transformers or the optimizer's package refuses."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    if plan.device.value == "cpu" and "ddp_timeout" in plan.arguments and not World.here().alone:
        # TrainingArguments hands the key on for other devices alone (_setup_devices).
        PartialState(cpu=True, timeout=timedelta(seconds=plan.arguments["ddp_timeout"]))
    with refusals_told():
        made = (prepared.arguments or TrainingArguments)(**plan.arguments)
    checks.refuse_unusable(made, prepared.model, plan.choices["steps"].value)
    return one_gpu(made)


def one_gpu(arguments: Any) -> Any:
    """Return the training arguments, for one process and one GPU, as the choice `gpus` says."""
    if arguments.n_gpu > 1:  # Trainer reads what it found once
        arguments._n_gpu = 1
    return arguments


@contextmanager
def refusals_told() -> Iterator[None]:
    """Raise UserError for what the constructors of training arguments and trainers refuse."""
    try:
        yield
    except REFUSALS as error:
        raise UserError(f"training: transformers refuses it: {first_line(error)}") from error


# ---- training ----


def train(plan: Plan, prepared: Prepared, trainer: Any, watch: Stopwatch, run_dir: RunDir) -> Trained:
    """Train, from the folder's checkpoint where there is one, keep the model, and measure it.

    Prints a line for each logging step. Raises RunError for a loss that is NaN or infinite, Stopped where a signal ends
    it.
    """
    from hf_mps.finetune.report.step_lines import StepLines
    from hf_mps.finetune.run.callbacks import lower_rate
    from hf_mps.finetune.run.interrupt import Interruption
    from hf_mps.layer.guards.sentinels import numbers, stopped_gpu

    counting = kernels.counting() if plan.device.value == "mps" else None
    peak, interruption = Peak(plan.device.value), Interruption()
    interruption.trainer, trainer.interruption = trainer, interruption  # each calls the other
    trainer.add_callback(interruption)
    main, better = prepared.metrics.main, prepared.metrics.greater_is_better
    lines = StepLines(memory=lambda: (peak.sample(), peak.result.value), main_metric=main, greater_is_better=better)
    start = str(run_dir.checkpoint) if run_dir.checkpoint is not None else trainer.args.resume_from_checkpoint
    if prepared.stream is not None:
        trainer.get_train_dataloader().begin(Path(start) if start is not None else None)
    # In a script these two warn; here they end the run, as FiniteLoss does, which sees only what is logged.
    finite = numbers.NON_FINITE.stopping(lower_rate(trainer.args.learning_rate))
    whole = stopped_gpu.STOPPED_GPU.stopping(f"{stopped_gpu.CURE}; the same command goes on from the last checkpoint")
    with (
        ExitStack() as held,
        peak,
        lines.attach(trainer),
        interruption,
        notices.redirected(lines.note),
        finite,
        whole,
        resume.recipe(),
        checkpoint_files.removed_whole(),
    ):
        for feature in FEATURES:
            held.enter_context(feature.around(trainer, plan))
        trained = trainer.train(resume_from_checkpoint=start)
        # A loss that was never logged, as of a run shorter than logging_steps.
        if not math.isfinite(trained.training_loss):
            raise RunError(f"the training loss is {trained.training_loss}; next: a lower training.learning_rate")
        keep(trainer, prepared.save, run_dir)  # first of all: the hours of training are in it
        measured = _measured(trainer)
        for name, dataset in prepared.further.items():
            measured |= trainer.evaluate(eval_dataset=dataset, metric_key_prefix=name)
    for feature in FEATURES:
        feature.outcome(trainer, plan.choices)
    ran = None if counting is None else counting.coverage
    # The clock that ran: Trainer makes new callbacks where it restores their states.
    clock = next((one for one in trainer.callback_handler.callbacks if isinstance(one, type(watch))), watch)
    return Trained(trainer, measured, clock, peak.result.value, ran)


def _measured(trainer: Any) -> dict[str, float]:
    """Return the metrics of the kept weights: of the evaluation that saw them, or of a new one."""
    state = trainer.state
    kept = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    for entry in reversed(state.log_history):
        if entry.get("step") == kept and "eval_loss" in entry:
            return dict(entry)
    return dict(trainer.evaluate())


def keep(trainer: Any, save: Callable[[Any, Path], None] | None, run_dir: RunDir) -> None:
    """Write the trained model into the run's folder: whole, or by `save` of the task. Every rank calls it."""
    if trainer.is_fsdp_enabled:
        # Trainer.save_model writes nothing where checkpoints are of parts (SHARDED_STATE_DICT).
        state = trainer.accelerator.get_state_dict(trainer.model)
        if trainer.args.should_save:
            trainer._save(str(run_dir.staging), state_dict=state)
    elif save is not None:
        processes.by_writers(run_dir, lambda: save(trainer, run_dir.staging))
    else:
        trainer.save_model(str(run_dir.staging))
    processes.by_writers(run_dir, run_dir.publish)


# ---- report ----


def report(
    run: PreparedRun, record: RunRecord, trainer: Any, run_dir: RunDir, load: Callable[[], None] | None = None
) -> None:
    """Write the files of a run that has trained, and print its table; every rank takes part.

    `load` gives the trainer the kept weights, where it has not trained them itself.
    """

    def answer() -> predictions.Written:
        trainer.remove_stop_checkpoints()
        if load is not None:
            load()
        return predictions.write(run_dir.path, run.prepared, trainer)

    if World.here().main:
        files = write(run_dir.path, record, answer)
        closing_table(run.resolved, record, [run_dir.path, *files])
        return
    if load is not None:
        load()
    predictions.take_part(run.prepared, trainer)


def finish_report(run: PreparedRun, run_dir: RunDir) -> RunRecord:
    """Write the report of a run that was killed behind its training, from its record and the model in its folder."""
    from hf_mps.finetune.models import lora
    from hf_mps.finetune.run.callbacks import Stopwatch

    ranks, record = Ranks.here(), Ranks.here().from_main(lambda: pending(run_dir.path))
    if run_dir.writes:
        run_dir.staging.rmdir()  # the model was moved out of it before the kill
    if ranks.world.main:
        print(f"{run_dir.path}: the training has ended; the report is written from what it stored")
    plan = make_plan(run, Choice(run_dir.path, run_dir.reason))
    trainer = ranks.run_on_all(lambda: make_trainer(plan, run.prepared, Stopwatch()))
    report(run, record, trainer, run_dir, lambda: lora.load_kept(trainer, run_dir.path))
    return record
