"""A training from its plan to the metrics of its kept weights, by transformers' Trainer or the task's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps import kernels
from hf_mps.core import checkpoint_files, notices
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.text import first_line
from hf_mps.finetune import sharding
from hf_mps.finetune.capture import attention_kernels
from hf_mps.finetune.models import attention, quantization
from hf_mps.finetune.report import screen
from hf_mps.finetune.run import early_steps, evaluation, links, optimization
from hf_mps.finetune.sharding import engine
from hf_mps.finetune.text import buckets
from hf_mps.guards import resume
from hf_mps.step import switch

if TYPE_CHECKING:
    from hf_mps.finetune.run.callbacks import Stopwatch
    from hf_mps.finetune.run.plan import Plan
    from hf_mps.finetune.stream.dataset import Streamed
    from hf_mps.finetune.tasks._base import Prepared
    from hf_mps.kernels.coverage import Coverage

# What the constructors of training arguments and trainers raise for options that do not go together.
REFUSALS = (ValueError, TypeError, ImportError)


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


def train_and_measure(
    plan: Plan,
    prepared: Prepared,
    trainer: Any,
    watch: Stopwatch,
    checkpoint: Path | None,
    keep: Callable[[], None],
) -> Trained:
    """Train, from `checkpoint` where there is one, `keep` the model, and measure it; prints a line a logging step.

    Raises RunError for a loss that is NaN or infinite, Stopped where a signal ends it.
    """
    from hf_mps.device.memory import Peak
    from hf_mps.finetune.run.callbacks import lower_rate
    from hf_mps.finetune.run.interrupt import Interruption
    from hf_mps.guards.sentinels import non_finite, stopped_gpu

    counting = kernels.counting() if plan.device.value == "mps" else None
    peak, interruption = Peak(plan.device.value), Interruption()
    interruption.trainer = trainer
    trainer._evaluate = partial(interruption.keep_before, trainer._evaluate)
    trainer.add_callback(interruption)
    links.step_locally(trainer, plan.choices)
    lines = screen.StepLines(
        memory=lambda: (peak.sample(), peak.result.value),
        main_metric=prepared.metrics.main,
        greater_is_better=prepared.metrics.greater_is_better,
    )
    start = str(checkpoint) if checkpoint is not None else trainer.args.resume_from_checkpoint
    if prepared.stream is not None:
        trainer.get_train_dataloader().begin(Path(start) if start is not None else None)
    finite = non_finite.SENTINEL.stopping(lower_rate(trainer.args.learning_rate))
    whole = stopped_gpu.SENTINEL.stopping(f"{stopped_gpu.CURE}; the same command goes on from the last checkpoint")
    fused = switch.running(plan.choices["fused_step"], plan.device.value)
    kernels_chosen = attention_kernels.chosen(plan.choices.get(attention_kernels.KEY))
    quiet = engine.quiet() if trainer.is_fsdp_enabled else nullcontext()
    with (
        peak,
        lines.attach(trainer),
        interruption,
        notices.told(lines.note),
        finite,
        whole,
        fused,
        kernels_chosen,
        quiet,
        resume.recipe(),
        checkpoint_files.removed_whole(),
    ):
        trained = trainer.train(resume_from_checkpoint=start)
        if not math.isfinite(trained.training_loss):
            raise RunError(f"the training loss is {trained.training_loss}; next: a lower training.learning_rate")
        keep()
        measured = _measured(trainer)
        for name, dataset in prepared.further.items():
            measured |= trainer.evaluate(eval_dataset=dataset, metric_key_prefix=name)
    ran = None if counting is None else counting.coverage
    return Trained(trainer, measured, _running(trainer, watch), peak.result.value, ran)


def make_trainer(plan: Plan, prepared: Prepared, watch: Stopwatch, patience: int | None) -> Any:
    """Return the trainer of a plan. Raises UserError for arguments that transformers refuses."""
    from transformers import EarlyStoppingCallback, Trainer

    from hf_mps.finetune.loss import accumulation
    from hf_mps.finetune.run.callbacks import FiniteLoss, MainStatistics, OwnDraws
    from hf_mps.finetune.run.missed_evaluation import MissedEvaluation
    from hf_mps.finetune.run.processes import Shares

    attention.give(prepared, plan.choices.get("attention"))
    callbacks: list[Any] = [watch, FiniteLoss(), OwnDraws(), MainStatistics()]
    if patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=patience))
    args = training_arguments(plan, prepared)
    callbacks.append(Shares.of(args))
    sharded = engine.ready(prepared.model, plan.device.value) if sharding.KEY in plan.choices else nullcontext()
    try:
        with sharded:
            trainer = (prepared.trainer or Trainer)(
                model=prepared.model,
                args=args,
                train_dataset=prepared.train,
                eval_dataset=prepared.validation,
                data_collator=prepared.collator,
                processing_class=prepared.processing_class,
                compute_metrics=prepared.compute_metrics,
                callbacks=callbacks,
                **prepared.trainer_settings,
            )
    except REFUSALS as error:
        raise refused(error) from error
    quantization.place(trainer.model, args.device)
    links.compress(trainer, plan.choices)
    evaluation.every_row(trainer)
    if prepared.stream is not None:
        _stream(trainer, plan, prepared.stream, prepared)
    elif plan.choices["sampling"].value == buckets.BUCKETED:
        buckets.install_sampler(trainer, prepared, plan.drawn)
    if args.gradient_accumulation_steps > 1 or args.world_size > 1:
        accumulation.fix_accumulation_scaling(trainer)
    early_steps.install(trainer, plan.choices)
    MissedEvaluation(trainer)
    if args.device.type != plan.device.value:
        raise RuntimeError(f"Trainer took {args.device.type} where the plan says {plan.device.value}")
    return trainer


def _stream(trainer: Any, plan: Plan, stream: Streamed, prepared: Prepared) -> None:
    """Let the trainer take its batches from the stream, which puts rows of like length together where the plan says."""
    from hf_mps.finetune.stream import loader
    from hf_mps.finetune.stream.batches import Arranging

    grouped = plan.choices["sampling"].value == buckets.BUCKETED
    target = prepared.choices["lengths"].value.target
    loader.install(trainer, stream, Arranging(trainer._train_batch_size, grouped, target, trainer.args.seed))


def training_arguments(plan: Plan, prepared: Prepared) -> Any:
    """Return a plan's training arguments. Raises UserError for what transformers or the optimizer's package refuses."""
    from transformers import TrainingArguments

    try:
        made = (prepared.arguments or TrainingArguments)(**plan.arguments)
    except REFUSALS as error:
        raise refused(error) from error
    optimization.refuse_unusable(made, prepared.model, plan.choices["steps"].value, plan.arguments)
    return one_gpu(made)


def one_gpu(arguments: Any) -> Any:
    """Return the training arguments, for one process and one GPU, as the choice `gpus` says."""
    if arguments.n_gpu > 1:  # Trainer reads what it found once
        arguments._n_gpu = 1
    return arguments


def refused(error: Exception) -> UserError:
    return UserError(f"training: transformers refuses it: {first_line(error)}")


def _running(trainer: Any, watch: Stopwatch) -> Stopwatch:
    """Return the clock that ran: Trainer makes new callbacks where it restores their states."""
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, type(watch))), watch)


def _measured(trainer: Any) -> dict[str, float]:
    """Return the metrics of the kept weights: of the evaluation that saw them, or of a new one."""
    state = trainer.state
    kept = state.best_global_step if trainer.args.load_best_model_at_end else state.global_step
    for entry in reversed(state.log_history):
        if entry.get("step") == kept and "eval_loss" in entry:
            return dict(entry)
    return dict(trainer.evaluate())
