"""Hosts of a run that share no folder: each keeps a run folder of its own, and they go on only from the same state."""

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
from hf_mps.finetune.features.base import Plan
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run.failures import RESULTS
from hf_mps.finetune.run.run_dir import STATE, RunDir, checkpoints, differences

OF_RANK = re.compile(r"_(\d+)\.\w+$")
"""The number of the rank in a file of a checkpoint that each writes for itself, such as rng_state_1.pth."""


class _State(NamedTuple):
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
    if ranks.world.hosts == 1 or chosen.finished:
        return
    states = ranks.gather(_state(chosen.path, resolved))

    def judge() -> None:
        main, path = states[0], chosen.path
        next_step = (
            "next: start the hosts in the same order as before (--node_rank), give all of them the same folder, or"
            " --fresh with an output_dir that none of them has"
        )
        for one in states:
            if one.has != main.has:
                raise UserError(f"{path} {main.has} on {main.host} and {one.has} on {one.host}; {next_step}")
            if (others := set(one.files) ^ set(main.files)) or one.losses != main.losses:
                what = ", ".join(sorted(others)) or "logged losses"
                raise UserError(f"{path} {main.has}, which differs on {main.host} and {one.host} ({what}); {next_step}")
        # Another number of processes than a checkpoint was written by has other random draws anyway.
        if {rank for one in states for rank in one.of_ranks} == set(range(len(states))):
            for rank, one in enumerate(states):
                if rank not in one.of_ranks:
                    raise UserError(
                        f"{path} {main.has}, which lacks the files of rank {rank} on {one.host}; {next_step}"
                    )

    ranks.from_main(judge)


def _state(path: Path, resolved: ResolvedRecipe) -> _State:
    host = platform.node()
    nothing = _State(host, "holds nothing of this run")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return nothing
    if differences(path, resolved, moved=True) != []:
        return _State(host, "holds something else")
    if (path / RESULTS).exists():
        return _State(host, "holds this recipe's finished run")
    if RunDir(path, "", named=True).holds_model():
        return _State(host, "holds the trained model")
    if not (whole := checkpoints(path)):
        return nothing
    names = sorted(file.relative_to(whole[-1]).as_posix() for file in whole[-1].rglob("*") if file.is_file())
    logged = json.loads((whole[-1] / STATE).read_text(encoding="utf-8"))["log_history"]
    return _State(
        host,
        f"holds {whole[-1].name}",
        tuple(name for name in names if OF_RANK.search(name) is None),
        tuple({int(found[1]) for name in names if (found := OF_RANK.search(name)) is not None}),
        tuple(entry["loss"] for entry in logged if "loss" in entry),
    )


@contextmanager
def own_folder(run_dir: RunDir, resolved: ResolvedRecipe) -> Iterator[RunDir]:
    """Give the main process's locked folder, or where this host does not see it one of its own, locked as well.

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
        makes = world.local_main and not seen[world.rank]
        ranks.run_on_all(lambda: held.enter_context(own.lock()) if makes else None)
        yield own


def saved_on_each(plan: Plan, run_dir: RunDir) -> Plan:
    """Return the plan of a run in which the first process of each host saves, where the hosts share no folder.

    Raises UserError where each rank would write a part of a checkpoint.
    """
    if run_dir.shared:
        return plan
    if sharding.KEY in plan.choices and plan.arguments.get("save_strategy") != "no":
        raise UserError(
            f"FSDP writes the checkpoints of all ranks into one folder, and the hosts do not share {run_dir.path};"
            " next: an output_dir that all hosts share, or training.save_strategy=no"
        )
    output = plan.choices["output"]
    each = Choice(output.value, f"{output.reason}; the hosts share no folder, so each keeps checkpoints and model")
    return replace(
        plan, choices=plan.choices | {"output": each}, arguments=plan.arguments | {"save_on_each_node": True}
    )


def by_writers(run_dir: RunDir, make: Callable[[], Any]) -> None:
    """Call `make` in the one process that writes into each folder of the run; called by every rank."""
    Ranks.here().run_on_all(lambda: make() if run_dir.writes else None)
