"""Hosts of a run that share no folder: the run's is the main process's, and the others get from it what they need.

The checkpoint that a run goes on from is lent to each of them, the weights that a training ends with are sent as they
are in memory. What a rank writes into a checkpoint is brought to the main process by the guard atomic-checkpoint.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_mps.core import checkpoint_files, notices
from hf_mps.core.errors import UserError
from hf_mps.core.files import write_json
from hf_mps.core.text import duration, memory
from hf_mps.distributed import carry
from hf_mps.distributed.ranks import Ranks
from hf_mps.finetune import sharding
from hf_mps.finetune.features.base import Plan
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run.failures import RESULTS
from hf_mps.finetune.run.run_dir import STATE, RunDir, checkpoints, differences


def refuse_older(resolved: ResolvedRecipe, chosen: RunDir) -> None:
    """Raise UserError, on all ranks, where another host's folder has more of the recipe's run than the one `chosen`.

    That is so where the machines change places between two starts: the run would begin again on a main host that has
    nothing of it. Called by every rank; where all share the folder they see the same.
    """
    ranks = Ranks.here()
    if ranks.world.hosts == 1:
        return
    path = chosen.path
    hosts = ranks.gather((_reached(path, resolved), platform.node()))

    def judge() -> None:
        (finished, step), host = max(hosts, key=lambda one: one[0])
        (_, own), main = hosts[0]
        if (finished, step) <= hosts[0][0]:
            return
        has = "is finished" if finished else f"holds checkpoint-{step}"
        here = f"has checkpoint-{own}" if own else "has none of it"
        raise UserError(
            f"this recipe's run in {path} {has} on {host}, and {main}, the main host now, {here}; next: let {host} be"
            " the main one (--node_rank 0, --machine_rank 0), bring its folder here, or --fresh"
        )

    ranks.from_main(judge)


def _reached(path: Path, resolved: ResolvedRecipe) -> tuple[bool, int]:
    """Return how far the recipe's run in a folder of this host is: whether it is finished, and its last checkpoint."""
    if differences(path, resolved, moved=True) != []:
        return False, 0
    whole = checkpoints(path)
    return (path / RESULTS).exists(), int(whole[-1].name.rpartition("-")[2]) if whole else 0


@contextmanager
def at_hand(run_dir: RunDir) -> Iterator[RunDir]:
    """Give the main process's locked folder as this host has it, with its own copy of the checkpoint to go on from.

    Called by every rank. Where all hosts share the folder nothing is copied; a copy is gone when the block has ended.
    Raises UserError, on all ranks, where one has no room for it, RunError where it came otherwise than it was read.
    """
    ranks = Ranks.here()
    if ranks.world.hosts == 1:
        yield run_dir
        return
    seen = carry.seen(ranks, run_dir.staging)
    hosts = ranks.gather(platform.node())
    without = tuple(dict.fromkeys(host for host, sees in zip(hosts, seen, strict=True) if not sees))
    here = replace(run_dir, without=without, host="" if seen[ranks.world.rank] else hosts[0])
    if run_dir.checkpoint is None or not without:
        yield here
        return
    with _lent(ranks, here, seen) as checkpoint:
        yield replace(here, checkpoint=checkpoint)


@contextmanager
def _lent(ranks: Ranks, run_dir: RunDir, seen: list[bool]) -> Iterator[Path]:
    """Give the main process's checkpoint, on a host that does not see it its copy, which one rank of it receives."""
    assert run_dir.checkpoint is not None
    began, checkpoint, world = time.monotonic(), run_dir.checkpoint, ranks.world
    files = ranks.from_main(lambda: carry.listing(checkpoint))
    size = sum(file.size for file in files)
    first = ranks.gather(world.local_main)
    receivers = [rank for rank, sees in enumerate(seen) if not sees and first[rank]]
    with ExitStack() as held:

        def bring() -> Path:
            if world.rank not in (0, *receivers):
                return checkpoint
            # Of a sweep each run has a path of its own.
            carry.carry(ranks, str(run_dir.path / checkpoint.name), files, folder, sender=0, receivers=receivers)
            return checkpoint if world.main else _named(folder, checkpoint.name)

        takes = world.rank in receivers
        folder = ranks.alike(lambda: held.enter_context(_place(checkpoint, size)) if takes else checkpoint)
        copies = ranks.gather((world.node, ranks.alike(bring)))
        seconds = time.monotonic() - began
        others = ", ".join(run_dir.without)
        notices.say(
            f"{checkpoint.name} ({memory(size)}) was sent to {others} in {duration(seconds)}: the folder"
            f" {run_dir.path} is not shared, and the copy is gone when the run ends"
        )
        mine = [copy for node, copy in copies if node == world.node]
        yield mine[0]


def _named(folder: Path, name: str) -> Path:
    """Let the copy that came have the checkpoint's name; the best one that it speaks of is none of this host's."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    write_json(folder / STATE, state | {"best_model_checkpoint": None})
    return folder.rename(folder.with_name(name))


@contextmanager
def _place(checkpoint: Path, size: int) -> Iterator[Path]:
    """Give an empty folder in a hidden one for a copy of `size` bytes. Raises UserError where it has no room."""
    with ExitStack() as held:
        try:
            hidden = held.enter_context(checkpoint_files.set_aside(checkpoint, "lent"))
            free = shutil.disk_usage(hidden).free
            (coming := hidden / "coming").mkdir()
        except OSError as error:
            raise UserError(
                f"no copy of {checkpoint} can be made here: {error.strerror}; next: another output_dir, or one that all"
                " hosts share"
            ) from error
        if free < size:
            raise UserError(
                f"a copy of {checkpoint} needs {memory(size)} here, and {memory(free)} are free; next: make room, or an"
                " output_dir that all hosts share"
            )
        yield coming


def best_for_all(trainer: Any, run_dir: RunDir) -> Callable[[], None]:
    """Return what, called by every rank behind the training, gives all of them the weights that the main one ends with.

    Trainer has each rank read the best checkpoint, and one that finds none goes on with its last weights.
    """
    if not run_dir.without or not trainer.args.load_best_model_at_end:
        return lambda: None
    if run_dir.host:
        trainer._load_best_model = lambda: None  # a folder of that name here would be another run's
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]

    def share() -> None:
        from torch import distributed

        weights = dict(trainer.model.named_parameters())
        for tensor in (*(weights[name].data for name in trained), *trainer.model.buffers()):
            distributed.broadcast(tensor, 0)

    return share


def refuse_parts(plan: Plan, run_dir: RunDir) -> None:
    """Raise UserError where each rank would write a part of a checkpoint into a folder of its own."""
    if run_dir.without and sharding.KEY in plan.choices and plan.arguments.get("save_strategy") != "no":
        others = ", ".join(run_dir.without)
        raise UserError(
            f"FSDP writes checkpoints of all ranks into one folder, and {run_dir.path} of"
            f" {run_dir.host or platform.node()} is none of {others}; next: an output_dir that all hosts share, or"
            " training.save_strategy=no"
        )
