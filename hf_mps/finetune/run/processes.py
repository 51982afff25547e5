"""A run in several processes: hosts that share no folder, and another number of processes than the run began in.

The rows of a step stay what they were: Trainer counts steps, skips batches and sets the learning rate by steps, so that
all of these hold. A step's rows are consecutive ones of the epoch's order, however many processes share them
(accelerate's BatchSamplerShard deals out batches in turn).
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.distributed.ranks import Ranks
from hf_mps.finetune import sharding
from hf_mps.finetune.features.arguments import SIZE
from hf_mps.finetune.features.base import Plan
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run.failures import RESULTS
from hf_mps.finetune.run.run_dir import STATE, RunDir, checkpoints, differences

OF_RANK = re.compile(r"_(\d+)\.\w+$")
"""The number of the rank in a file of a checkpoint that each writes for itself, such as rng_state_1.pth."""


class HostState(NamedTuple):
    """How far a rank's host is with a run: in words, and by the files, ranks and losses of its last checkpoint."""

    host: str
    has: str
    files: tuple[str, ...] = ()
    of_ranks: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()


def refuse_different(resolved: ResolvedRecipe, chosen: RunDir) -> None:
    """Raise UserError, on all ranks, where the hosts' folders for the run hold different states of it.

    Called by every rank. Hosts that share the folder see the same one.
    """
    ranks = Ranks.here()
    if ranks.world.hosts > 1 and not chosen.finished:
        states = ranks.gather(_state(chosen.path, resolved))
        ranks.from_main(lambda: _judge(states, chosen.path))


def _judge(states: list[HostState], path: Path) -> None:
    main, every = states[0], {rank for one in states for rank in one.of_ranks}
    again = "start the hosts in the same order as before (--node_rank), give all of them the same folder"
    next_step = f"next: {again}, or --fresh with an output_dir that none of them has"
    for rank, one in enumerate(states):
        if one.has != main.has:
            raise UserError(f"{path} {main.has} on {main.host} and {one.has} on {one.host}; {next_step}")
        if (others := set(one.files) ^ set(main.files)) or one.losses != main.losses:
            what = ", ".join(sorted(others)) or "logged losses"
            raise UserError(f"{path} {main.has}, which differs on {main.host} and {one.host} ({what}); {next_step}")
        # Another number of processes than a checkpoint was written by has other random draws anyway.
        if every == set(range(len(states))) and rank not in one.of_ranks:
            raise UserError(f"{path} {main.has}, which lacks the files of rank {rank} on {one.host}; {next_step}")


def _state(path: Path, resolved: ResolvedRecipe) -> HostState:
    host = platform.node()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        if differences(path, resolved, moved=True) != []:
            return HostState(host, "holds something else")
        if (path / RESULTS).exists():
            return HostState(host, "holds this recipe's finished run")
        if RunDir(path, "", named=True).holds_model():
            return HostState(host, "holds the trained model")
    if not (whole := checkpoints(path)):
        return HostState(host, "holds nothing of this run")
    names = sorted(file.relative_to(whole[-1]).as_posix() for file in whole[-1].rglob("*") if file.is_file())
    logged = json.loads((whole[-1] / STATE).read_text(encoding="utf-8"))["log_history"]
    files = tuple(name for name in names if OF_RANK.search(name) is None)
    of_ranks = tuple({int(found[1]) for name in names if (found := OF_RANK.search(name)) is not None})
    losses = tuple(entry["loss"] for entry in logged if "loss" in entry)
    return HostState(host, f"holds {whole[-1].name}", files, of_ranks, losses)


@contextmanager
def own_folder(run_dir: RunDir, resolved: ResolvedRecipe) -> Iterator[RunDir]:
    """Yield the main process's locked folder, or a locked one on this host where the host does not see that one.

    Called by every rank. The path is the same on all hosts, but for a smoke run, whose folder is a temporary one.
    """
    ranks = Ranks.here()
    world = ranks.world
    if world.hosts == 1 or all(seen := ranks.sees(run_dir.staging)):
        yield run_dir
        return
    with ExitStack() as held:
        smoke = resolved.smoke is not None and resolved.recipe.output_dir is not None
        path = Path(str(resolved.recipe.output_dir)) if smoke and not seen[world.rank] else run_dir.path
        of_host = [path for node, path in ranks.gather((world.node, path)) if node == world.node]
        own = replace(run_dir, path=of_host[0], named=True, shared=False)
        ranks.run_on_all(lambda: held.enter_context(own.lock()) if world.local_main and not seen[world.rank] else None)
        yield own


def saved_on_each(plan: Plan, run_dir: RunDir) -> Plan:
    """Return the plan of a run in which the first process of each host saves, where the hosts share no folder.

    Raises UserError where each rank would write a part of a checkpoint.
    """
    if run_dir.shared:
        return plan
    if sharding.KEY in plan.choices and plan.arguments.get("save_strategy") != "no":
        told = f"FSDP writes the checkpoints of all ranks into one folder, and the hosts do not share {run_dir.path}"
        raise UserError(f"{told}; next: an output_dir that all hosts share, or training.save_strategy=no")
    output = plan.choices["output"]
    own = Choice(output.value, f"{output.reason}; the hosts share no folder, so each keeps checkpoints and model")
    return replace(plan, choices=plan.choices | {"output": own}, arguments=plan.arguments | {"save_on_each_node": True})


def by_writers(run_dir: RunDir, make: Callable[[], Any]) -> None:
    """Call `make` in the one process that writes into each folder of the run; called by every rank."""
    Ranks.here().run_on_all(lambda: make() if run_dir.writes else None)


KEY = "processes"
ACCUMULATION = "gradient_accumulation_steps"


def go_on(plan: Plan, checkpoint: Path | None, processes: int) -> Plan:
    """Return the plan of a run that resumes from `checkpoint`, perhaps in another number of processes.

    Raises UserError where they cannot share the rows of a step.
    """
    if checkpoint is None:
        return plan
    from hf_mps.finetune.run.callbacks import Shares

    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    before = Shares.stored(state)
    if before is None or before.processes == processes:
        return plan
    share, rest = divmod(before.rows, processes)
    count = "1 process" if before.processes == 1 else f"{before.processes} processes"
    began = f"the run began in {count}, with {before.rows} rows in a step"
    if rest:
        told = f"{checkpoint.parent}: {began}, which {processes} processes cannot share"
        allowed = ", ".join(str(number) for number in range(1, before.rows + 1) if before.rows % number == 0)
        raise UserError(f"{told}; allowed: {allowed} processes; next: one of these numbers, or --fresh")
    batch = next(size for size in range(min(before.batch, share), 0, -1) if share % size == 0)
    passes = share // batch
    sharing = f"{passes} batches of {batch}" if passes > 1 else f"a batch of {batch}"
    changed = f"{began}; each has {sharing} now, so that the same rows are left; random draws (dropout) are others"
    choices = plan.choices | {
        KEY: Choice(processes, changed),
        "batch": Choice(batch, f"a step has the {before.rows} rows that it had"),
        "steps": Choice(state["max_steps"], "as the run began"),
    }
    arguments = plan.arguments | {SIZE: batch, ACCUMULATION: passes, "logging_steps": state["logging_steps"]}
    if arguments.get("max_steps", -1) > 0:  # a stream's plan counted its steps by today's batch
        arguments["max_steps"] = state["max_steps"]
    return replace(plan, choices=choices, arguments=arguments, bucket_pool_size=before.processes * before.batch)
