"""The record of a finished run, what each of its processes did, and what a run prints of itself."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune.recipe import expect, training_section
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.report import RunRecord, screen
from hf_mps.finetune.smoke import files_stay
from hf_mps.layer import guards
from hf_mps.layer.integrations.trainer_logs import of_training
from hf_mps.metal import fallback, kernels
from hf_mps.metal.device import simulated
from hf_mps.metrics.selection import is_metric

if TYPE_CHECKING:
    from hf_mps.finetune.features.base import Plan
    from hf_mps.finetune.run.stages import Trained
    from hf_mps.finetune.tasks import Prepared

# Names that would make the header's first column wider than all others do.
SHORT_NAMES = {"logging_nan_inf_filter": "NaN filter"}
MOST = 12
"""Lines of a run's header below its title, which a person reads before the first step."""
# What the header of a run shows, the most important first: what runs on what, for how long, and what is unusual.
HEADLINES = (
    *("smoke", "model", "data", "device", "processes", "precision", "batch", "lengths", "steps", "memory"),
    *("unknown_tokens", "on_the_cpu", "early_stopping", "checkpointing", "attention", "step_in_backward"),
    *("quantization", "lora", "sleep"),
)


def make_record(resolved: ResolvedRecipe, plan: Plan, prepared: Prepared, trained: Trained) -> RunRecord:
    """Return the record of a run whose training ended as `trained`."""
    trainer, watch, recipe, data = trained.trainer, trained.watch, resolved.recipe, resolved.recipe.data
    metrics = {name.removeprefix("eval_"): value for name, value in trained.measured.items() if is_metric(name)}
    metrics = dict(sorted(metrics.items(), key=lambda pair: (pair[0] != prepared.metrics.main, pair[0] == "loss")))
    stream = stream_figures(trainer, watch.seconds) if prepared.stream is not None else None
    fell_back = of_training(trainer)
    fallback = fell_back.as_dict()["operators"] if fell_back else []
    steps = trainer.state.global_step - watch.first_step
    # The last batch of an epoch may be short: rows seen are counted in epochs, and Trainer's epoch is a fraction.
    epochs = (trainer.state.epoch or 0.0) * steps / max(1, trainer.state.global_step)
    samples = epochs * len(prepared.train) if stream is None else stream["samples"]
    # A resumed run's log holds the peak of its earlier parts.
    peaks = [entry.get("peak_memory_bytes") or 0 for entry in trainer.state.log_history]
    from hf_mps.metal.training_kernels import trial  # which imports torch

    rows = f"generated {data.generated}" if data.generated else ", ".join((data.files or {}).values())
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
        baseline=prepared.baseline() if callable(prepared.baseline) else prepared.baseline,
        peak_memory=max([trained.peak, *peaks]),
        fallback=fallback,
        unexpected_fallback=[one["operator"] for one in fallback if one["operator"] not in recipe.fallback],
        metal_kernels=trained.metal_kernels,
        training_kernels={name: {"on": each.on, "reason": each.reason} for name, each in trial.known().items()},
        guards=guards.acted(),
        sentinels=guards.found(),
        world=of_all(trained, samples),
        expectation=expect.judge(recipe, resolved.changed, metrics),
        model=resolved.smoke.value if resolved.smoke else recipe.model,
        dataset=data.hub,
        dataset_config=data.config,
        dataset_name="made-up rows" if resolved.smoke else rows,
        pipeline_tag=prepared.task.pipeline_tag,
        auto_class=prepared.task.auto_class,
        snippet=prepared.snippet,
        library=prepared.task.library,
    )


def stream_figures(trainer: Any, seconds: float) -> dict[str, Any]:
    """Return what the training processes got of streamed rows, and how long they waited for it.

    Of several ranks, which get as much each, `samples` and `tokens` are all ranks' together, the others the main's own.
    """
    loader = trainer.get_train_dataloader()
    size = World.here().size
    return {
        "samples": round(loader.rows * size),
        "tokens": round(loader.tokens * size),
        "rows_read": loader.read,
        "rows_broken": loader.broken,
        "waited_seconds": loader.waited,
        "waited_share": loader.waited / seconds if seconds > 0 else 0.0,
        "first_batch_seconds": loader.first_wait,
    }


def of_all(trained: Trained, samples: float) -> dict[str, Any] | None:
    """Return the `world` of results.json for a training of `samples` rows; None for a process alone.

    Its keys: `processes`, `hosts` (their names), `strategy` and `backend` (accelerate's and torch.distributed's words),
    `samples_per_second` of all, `efficiency` (the mean share of the time in which they did not wait for each other, or
    None), and `ranks`, for each its `rank`, `host`, `device`, `samples_per_second` and `waited_seconds`. Called by all
    processes.
    """
    ranks = Ranks.here()
    if ranks.world.alone:
        return None
    trainer, seconds = trained.trainer, trained.watch.seconds
    device, speed = trainer.args.device, samples / seconds if seconds > 0 else 0.0
    if device.type == "cuda":
        import torch

        device = f"{device} ({torch.cuda.get_device_name(device)})"
    own: dict[str, Any] = {
        "rank": ranks.world.rank,
        "host": platform.node(),
        "device": str(device),
        "samples_per_second": speed / ranks.world.size,
        "waited_seconds": waited(trainer, trained.watch.first_step),
    }
    every = ranks.gather((own, seconds))
    shares = [1 - one["waited_seconds"] / all_ for one, all_ in every if one["waited_seconds"] is not None and all_ > 0]
    state = trainer.accelerator.state
    return {
        "processes": ranks.world.size,
        "hosts": list(dict.fromkeys(one["host"] for one, _ in every)),
        "strategy": getattr(state.distributed_type, "value", str(state.distributed_type)),
        "backend": state.backend,
        "samples_per_second": speed,
        "efficiency": max(0.0, sum(shares) / len(shares)) if len(shares) == len(every) else None,
        "ranks": [one for one, _ in every],
    }


def waited(trainer: Any, first_step: int) -> float | None:
    """Return the seconds for which the steps after `first_step` waited for other processes; None is not measured.

    DistributedDataParallel's own clock says so, which looks at the first ten steps and then at each hundredth: the time
    from the first gradient sent to the last one received, less what the backward pass ran meanwhile. It is not there
    where another way averages the gradients, such as steps recorded as CUDA graphs, and on mps, which that clock leaves
    out.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    clock = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sent, hidden = (clock.get(f"avg_backward_{name}_time") for name in ("comm", "compute_comm_overlap"))
    if sent is None or hidden is None:
        return None
    return float(max(0, sent - hidden) / 1e9 * (trainer.state.global_step - first_step))  # the clock's nanoseconds


def header(resolved: ResolvedRecipe, plan: Plan, verb: str = "finetune", *, brief: bool = False) -> None:
    """Print the decisions, each with its reason; a `brief` header has the `HEADLINES` alone, at most `MOST` lines."""
    words, choices = {"True": "on", "False": "off"}, plan.shown()
    rows: list[tuple[str, str, str]] = []
    below: list[tuple[str, str, str]] = []
    promised = expect.applies(recipe := resolved.recipe, resolved.changed)
    if recipe.expect and (promised.value or not brief):
        below.append(("expected", expect.ranges(recipe), promised.reason))
    if brief:
        if resolved.smoke is None:
            below.append(("more", "the same command with --plan", f"shows all {len(choices)} decisions"))
        shown = [name for name in HEADLINES if name in choices][: MOST - 1 - len(below)]
        choices = {name: choices[name] for name in (*shown, "output")}
    for name, choice in choices.items():
        value = str(choice.value)
        rows.append((SHORT_NAMES.get(name, name.replace("_", " ")), words.get(value, value), choice.reason))
    screen.header([*rows, *below], title=f"hf_mps {verb} {resolved.name}", brief=brief)


def closing_table(resolved: ResolvedRecipe, record: RunRecord, files: Sequence[Path]) -> None:
    """Print how the run ended, its folder with the files in it, and the commands that use the model."""
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
    if resolved.smoke is not None and not files_stay(resolved):
        screen.final_table(record, notes)
        return
    folder = shlex.quote(str(files[0]))
    commands = [f"hf-mps predict {folder} FILE", f"hf-mps evaluate {folder}", training_section.PUSH.format(folder)]
    screen.final_table(record, notes, files, commands)
