"""The record of a finished run for its report, made from the recipe, the plan and Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_mps.distributed.world import World
from hf_mps.finetune.recipe import expect
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.report import RunRecord
from hf_mps.finetune.run import ranks_record
from hf_mps.layer import guards
from hf_mps.layer.integrations.trainer_logs import of_training
from hf_mps.metal.device import simulated
from hf_mps.metrics.selection import is_metric

if TYPE_CHECKING:
    from hf_mps.finetune.features.base import Plan
    from hf_mps.finetune.run.stages import Trained
    from hf_mps.finetune.tasks._base import Prepared


def make_record(resolved: ResolvedRecipe, plan: Plan, prepared: Prepared, trained: Trained) -> RunRecord:
    """Return the record of a run whose training ended as `trained`."""
    trainer, watch = trained.trainer, trained.watch
    metrics = {name.removeprefix("eval_"): value for name, value in trained.measured.items() if is_metric(name)}
    reported = sorted(metrics, key=lambda name: (name != prepared.metrics.main, name == "loss"))
    metrics = {name: metrics[name] for name in reported}
    recipe = resolved.recipe
    stream = stream_figures(trainer, watch.seconds) if prepared.stream is not None else None
    fell_back = of_training(trainer)
    fallback = fell_back.as_dict()["operators"] if fell_back else []
    steps = trainer.state.global_step - watch.first_step
    # The last batch of an epoch may be short: rows seen are counted in epochs, and Trainer's epoch is a fraction.
    epochs = (trainer.state.epoch or 0.0) * steps / max(1, trainer.state.global_step)
    samples = epochs * len(prepared.train) if stream is None else stream["samples"]
    return RunRecord(
        name=resolved.name,
        recipe=recipe.model_dump(exclude_none=True),
        device=plan.device,
        simulated=simulated(plan.device.value),
        choices=plan.shown(),
        metrics=metrics,
        main_metric=prepared.metrics.main,
        greater_is_better=prepared.metrics.greater_is_better,
        log_history=trainer.state.log_history,
        train_seconds=watch.seconds,
        samples_per_second=samples / watch.seconds if watch.seconds > 0 else 0.0,
        stream=stream,
        baseline=prepared.baseline,
        peak_memory=_peak(trained),
        fallback=fallback,
        unexpected_fallback=[one["operator"] for one in fallback if one["operator"] not in recipe.fallback],
        metal_kernels=trained.metal_kernels,
        guards=guards.acted(),
        sentinels=guards.found(),
        world=ranks_record.of_all(trained, samples),
        expectation=expect.judge(recipe, resolved.changed, metrics),
        model=resolved.smoke.value if resolved.smoke else recipe.model,
        dataset=recipe.data.hub,
        dataset_config=recipe.data.config,
        dataset_name=_dataset_words(resolved),
        pipeline_tag=prepared.pipeline_tag,
        auto_class=prepared.auto_class,
        snippet=prepared.snippet,
        library=prepared.library,
    )


def stream_figures(trainer: Any, seconds: float) -> dict[str, Any]:
    """Return what the training processes got of streamed rows, and how long they waited for it.

    Of several ranks, which get as much each, `samples` and `tokens` are all ranks' together, the others the main's own.
    """
    loader = trainer.get_train_dataloader()
    size = World.here().size
    return {
        "samples": loader.rows * size,
        "tokens": loader.tokens * size,
        "rows_read": loader.read,
        "rows_broken": loader.broken,
        "waited_seconds": loader.waited,
        "waited_share": loader.waited / seconds if seconds > 0 else 0.0,
        "first_batch_seconds": loader.first_wait,
    }


def _peak(trained: Trained) -> int:
    """Return the peak memory in bytes; a resumed run's log holds that of its earlier parts."""
    logged = (entry.get("peak_memory_bytes") or 0 for entry in trained.trainer.state.log_history)
    return max([trained.peak, *logged])


def _dataset_words(resolved: ResolvedRecipe) -> str:
    data = resolved.recipe.data
    if resolved.smoke:
        return "made-up rows"
    if data.generated:
        return f"generated {data.generated}"
    return ", ".join(data.files.values()) if data.files else ""
