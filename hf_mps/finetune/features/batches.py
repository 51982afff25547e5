"""How many rows a step has, how they are drawn, and how many steps there are: of all processes together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.distributed.world import World
from hf_mps.finetune.features.base import SAID, Draft, Feature, Plan
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.stream import pace
from hf_mps.finetune.tasks import Prepared
from hf_mps.finetune.text import buckets

SIZE = "per_device_train_batch_size"


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
