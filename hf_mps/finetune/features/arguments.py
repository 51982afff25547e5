"""The arguments of a run: its batches and steps, and where its recipe says nothing the rest of TrainingArguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan
from hf_mps.finetune.recipe.expect import LOSS
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.stream import pace
from hf_mps.finetune.tasks import Prepared
from hf_mps.finetune.text import buckets
from hf_mps.metrics.table import LOWER_IS_BETTER

SIZE = "per_device_train_batch_size"
LOGGED_ROWS = 50
"""Step lines that a run prints at most, about."""


class Batches(Feature):
    """Batches of the task's size or of 32 rows, of like length where that saves padding."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `batch`, `sampling`, `steps` and, of several, `processes`.

        `batch` is the rows of one process at a time. Raises UserError where no batch is left.
        """
        recipe, training, prepared, choices = draft.recipe, draft.training, draft.prepared, draft.choices
        world, stream, accumulation = World.here(), prepared.stream, training.get("gradient_accumulation_steps", 1)
        choices |= _processes(world)
        reason = "the size that Hugging Face's GLUE examples use"
        if SIZE in prepared.arguments_defaults:
            reason = "the task's own"
        size, reason = training.get(SIZE, DEFAULT_BATCH), SAID if SIZE in recipe.training else reason
        choices["batch"] = Choice(size, reason + _whole(size, accumulation, world.size))
        # A task whose trainer draws its batches itself says how.
        drawn = prepared.choices.get("sampling") or buckets.decide(recipe, prepared.token_counts, size)
        choices["sampling"] = drawn if stream is None else pace.sampling(stream, drawn)
        if stream is None:
            epoch = prepared.epoch(training) if prepared.epoch is not None else None
            choices["steps"] = steps(training, epoch or len(prepared.train), size, accumulation, world.size)
        else:
            choices["steps"] = pace.steps(training, stream, recipe.data.rows.train, size, accumulation)
            # No batch is made to be skipped where a run resumes: the stream begins where it stopped.
            draft.fixed |= {"max_steps": choices["steps"].value, "ignore_data_skip": True}
        draft.arguments |= {SIZE: size, "per_device_eval_batch_size": max(size, DEFAULT_BATCH)}

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Let the trainer draw its batches so, and weigh those of a step by their rows."""
        grouped = plan.choices["sampling"].value == buckets.BUCKETED
        if prepared.stream is not None:
            from hf_mps.finetune.stream import loader
            from hf_mps.finetune.stream.batches import Arranging

            target = prepared.choices["lengths"].value.target
            arranging = Arranging(trainer._train_batch_size, grouped, target, trainer.args.seed)
            loader.install(trainer, prepared.stream, arranging)
        elif grouped:
            buckets.install_sampler(trainer, prepared, plan.bucket_pool_size)
        if trainer.args.gradient_accumulation_steps > 1 or trainer.args.world_size > 1:
            from hf_mps.finetune.loss import deferred_head

            deferred_head.fix_accumulation_scaling(trainer)


def steps(training: dict[str, Any], epoch: int | Choice[int], batch: int, passes: int, processes: int) -> Choice[int]:
    """Return the number of optimizer steps, as Trainer counts them. Raises UserError where no batch is left.

    `epoch` is the rows of one, a choice where they are not simply those that there are. Each of several processes has
    as many batches: the last ones are dropped, or filled up with rows from the beginning (accelerate's
    BatchSamplerShard).
    """
    rows, of = (epoch.value, epoch.reason) if isinstance(epoch, Choice) else (epoch, f"{epoch} rows")
    dropped = training.get("dataloader_drop_last")
    if dropped and rows < batch * processes:
        each = f"batches of {batch} for {processes} processes" if processes > 1 else f"batch of {batch}"
        told = f"training.dataloader_drop_last leaves nothing to train on: {rows} rows make no {each}"
        raise UserError(f"{told}; leave it out, or give a smaller training.{SIZE}")
    if training.get("max_steps", -1) > 0:
        return Choice(training["max_steps"], "max_steps in the recipe")
    epochs = training.get("num_train_epochs", 3)
    batches = rows // batch // processes if dropped else math.ceil(math.ceil(rows / batch) / processes)
    each_epoch = max(1, math.ceil(batches / passes))
    twice = 0 if dropped or processes == 1 else batches * batch * processes - rows
    filled = f"; each epoch ends with {counted(twice, 'row')} of its beginning, for full batches" if twice else ""
    words = f"{epochs:g} epoch{'s' * (epochs != 1)} of {each_epoch}, for {of}{filled}"
    return Choice(math.ceil(epochs * each_epoch), words)


def smaller(training: Mapping[str, Any], evaluation: bool) -> list[str]:
    """Return the words that halve a process's batch, of an evaluation or of a step, which then takes two for each one.

    `training` is that of a draft. Empty where a batch is a single row already.
    """
    train = int(training.get(SIZE, DEFAULT_BATCH))
    if evaluation:
        size = int(training.get("per_device_eval_batch_size", max(train, DEFAULT_BATCH)))
        return [f"training.per_device_eval_batch_size={size // 2}"] if size > 1 else []
    twice = 2 * int(training.get("gradient_accumulation_steps", 1))
    return [f"training.{SIZE}={train // 2}", f"training.gradient_accumulation_steps={twice}"] if train > 1 else []


def _whole(batch: int, accumulation: int, processes: int) -> str:
    """Say how many of one process's batches make a step, where it is more than one."""
    if accumulation == processes == 1:
        return ""
    of = f"{accumulation} of them" if accumulation > 1 else "one of them"
    by = f" on each of {processes} processes" if processes > 1 else ""
    made = "make" if accumulation > 1 else "makes"
    return f"; {of}{by} {made} a step of {batch * accumulation * processes} rows"


def _processes(world: World) -> dict[str, Choice[int]]:
    if not world.alone:
        where = "on this host" if world.hosts == 1 else f"on {world.hosts} hosts, {world.local_size} on each"
        told = f"the launcher started them, {where}; each step's gradients are the mean over all of them"
        return {"processes": Choice(world.size, told)}
    if not World.asked_for():
        return {}
    meant = "accelerate launch was told of several, and starts one by itself unless the type is MULTI_GPU or FSDP"
    return {"processes": Choice(1, f"{meant}; next: distributed_type: MULTI_GPU in its file, also without a GPU")}


class Evaluation(Feature):
    """After each epoch, with the newest two checkpoints kept; streamed rows, which have no epochs, after each third."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `evaluation`, `checkpoints` and `logging_nan_inf_filter`."""
        steps, training, choices = draft.choices["steps"].value, draft.training, draft.choices
        every = next(n * 10**power for power in range(9) for n in (1, 2, 5) if n * 10**power * LOGGED_ROWS >= steps)
        settled = {"logging_steps": every, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2}
        reason = "the default: after each epoch"
        if draft.prepared.stream is not None:
            third = math.ceil(steps / pace.EVALUATIONS)
            settled |= {"eval_strategy": "steps", "eval_steps": third, "save_strategy": "steps", "save_steps": third}
            reason = f"the default of streamed rows: every {third} steps, a third of the run"
        if "save_total_limit" not in training and training.get("save_strategy") == "no":
            del settled["save_total_limit"]
        choices["evaluation"] = draft.setting("eval_strategy", settled["eval_strategy"], reason)
        reason += f", the newest {training.get('save_total_limit', 2)} kept"
        choices["checkpoints"] = draft.setting("save_strategy", settled["save_strategy"], reason)
        # The filter replaces a NaN loss by the mean of the others, and waits for the device at every step to do so.
        settled["logging_nan_inf_filter"] = False
        reason = "a NaN loss stops the run, and no step waits for the device to look for one"
        choices["logging_nan_inf_filter"] = draft.setting("logging_nan_inf_filter", False, reason)
        draft.arguments |= settled


class KeptModel(Feature):
    """The last weights; the best ones where the recipe says so or stops early."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `kept_model` and `early_stopping`."""
        training, patience, choices = draft.training, draft.recipe.early_stopping_patience, draft.choices
        metric, greater = best_metric(training, draft.prepared)
        best = training.get("load_best_model_at_end", patience is not None)
        if patience is not None:
            choices["early_stopping"] = Choice(f"after {patience} evaluations without a better {metric}", SAID)
        reason = "the default: the validation rows pick nothing, so their score is fair"
        if best:
            reason = "early_stopping_patience in the recipe: the best so far"
        reason = SAID if "load_best_model_at_end" in training else reason
        choices["kept_model"] = Choice(f"best by {metric}" if best else "last", reason)
        settled: dict[str, Any] = {"load_best_model_at_end": True} if best else {}
        if patience is not None:  # a resumed run has as much patience left as it had
            settled["restore_callback_states_from_checkpoint"] = True
        if best or training.get("save_strategy") == "best" or "metric_for_best_model" in training:
            # Trainer takes every number but a loss for better the greater it is, an error rate too.
            settled |= {"metric_for_best_model": metric, "greater_is_better": greater}
            settled |= _plateau(training, metric, greater)
        draft.arguments |= settled

    def apply(self, trainer: Any, plan: Plan, prepared: Prepared) -> None:
        """Let the trainer stop early; a step that is only looked at evaluates nothing."""
        patience = plan.recipe.early_stopping_patience
        if patience is not None and trainer.args.metric_for_best_model is not None:
            from transformers import EarlyStoppingCallback

            trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=patience))


def best_metric(training: Mapping[str, Any], prepared: Prepared) -> tuple[str, bool]:
    """Return the metric that picks the best weights, without `eval_`, and whether a greater value is better.

    That is the recipe's `metric_for_best_model`, else the task's first metric. Raises UserError for a
    `greater_is_better` that reverses the metric.
    """
    name = str(training.get("metric_for_best_model") or prepared.metrics.main).removeprefix("eval_")
    greater = name != LOSS and name not in LOWER_IS_BETTER
    wanted = training.get("greater_is_better")
    if wanted is not None and wanted != greater:
        told = f"training.greater_is_better is {str(wanted).lower()}, and {_better(name, greater)}"
        raise UserError(f"{told}; leave it out")
    return name, greater


def _better(name: str, greater: bool) -> str:
    return f"{name} is better the {'greater' if greater else 'smaller'} it is"


def _plateau(training: Mapping[str, Any], name: str, greater: bool) -> dict[str, Any]:
    """Return Trainer's keywords for a schedule that waits for `name` to improve: PyTorch's default waits for less of
    it.

    Empty for any other schedule. Raises UserError where the recipe's `lr_scheduler_kwargs` would wait for worse.
    """
    given = training.get("lr_scheduler_kwargs")
    if training.get("lr_scheduler_type") != "reduce_lr_on_plateau":
        return {}
    mode = "max" if greater else "min"
    if given is None:
        return {"lr_scheduler_kwargs": {"mode": mode}}
    if isinstance(given, dict) and given.get("mode", "min") != mode:
        came = f"mode {given['mode']}" if "mode" in given else "no mode (PyTorch takes min)"
        told = f"training.lr_scheduler_kwargs has {came}, and {_better(name, greater)}"
        raise UserError(f"{told}; allowed: mode: {mode}")
    return {}


class Loading(Feature):
    """The training process itself, but for streamed rows; pinned memory on CUDA."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `pin_memory`, `workers` and, of streamed rows, `readers`."""
        choices, stream = draft.choices, draft.prepared.stream
        pinned = draft.device == "cuda"
        reason = "CUDA copies faster from pinned memory" if pinned else f"{draft.device} cannot use pinned memory"
        choices["pin_memory"] = draft.setting("dataloader_pin_memory", pinned, reason)
        why = "the training process prepares its rows itself; training.dataloader_num_workers=2 has others do it ahead"
        if draft.prepared.token_counts is not None:
            why = "tokenised rows are read from memory-mapped files, faster than from another process"
        workers = Choice(0, why) if stream is None else pace.workers()
        choices["workers"] = draft.setting("dataloader_num_workers", workers.value, workers.reason)
        if stream is not None:
            choices["readers"] = pace.readers(stream, choices["workers"].value)
        settled: dict[str, Any] = {"dataloader_pin_memory": pinned, "dataloader_num_workers": workers.value}
        # A copy that waits for the device ends what the processor has prepared ahead, batch by batch.
        draft.arguments |= settled | ({"accelerator_config": {"non_blocking": True}} if pinned else {})


class Optimizer(Feature):
    """Trainer's default, or the recipe's."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `optimizer`."""
        from transformers import TrainingArguments

        found = draft.setting("optim", str(TrainingArguments.default_optim), "Trainer's default")
        rate = draft.training.get("learning_rate", 5e-5)
        draft.choices["optimizer"] = Choice(found.value, f"{found.reason}; learning rate {rate:g}")


class Output(Feature):
    """The run's folder and device; no tracker and no bar but those that the recipe asks for."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `output`."""
        folder = str(draft.output.value)
        draft.choices["output"] = Choice(folder, draft.output.reason)
        # Without a name trackers draw one, and another for what comes after the training or in a resumed run.
        draft.arguments |= {"report_to": "none", "run_name": folder}
        draft.fixed |= {"output_dir": folder, "disable_tqdm": True, "use_cpu": draft.device == "cpu"}


class Seed(Feature):
    """The recipe's seed for everything that is drawn."""

    def decide(self, draft: Draft) -> None:
        """Choose the key `seed`."""
        seed = draft.recipe.seed
        draft.choices["seed"] = Choice(seed, "the recipe's seed, for weights, order of the rows and dropout")
        draft.fixed["seed"] = seed
        if not World.here().alone:
            # Else accelerate seeds the order of rows by the state of each rank's own draws (SeedableRandomSampler).
            draft.arguments["data_seed"] = seed
