"""One preparation of a run, for the run itself, `--plan`, `--sweep` and the verbs plan, audit and parity.

`locate` says where a run starts from and where it writes, and imports no torch; `prepare_run` reads the rows and has
the task make features and a model of them, after every check that needs no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from hf_mps import metrics
from hf_mps.core import status
from hf_mps.core.choice import Choice
from hf_mps.distributed.metal.claim import claim
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune import tasks
from hf_mps.finetune.data import load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import expect
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.run import caffeinate, checks, fingerprints, hosts
from hf_mps.finetune.run.plan import Plan, choose_device, decide
from hf_mps.finetune.run.room import Room
from hf_mps.finetune.run.run_dir import RunDir
from hf_mps.finetune.stream import pace
from hf_mps.finetune.tasks._base import Prepared


@dataclass(frozen=True)
class PreparedRun:
    """All that is known of a run before its plan: a recipe that is possible on `device`, its rows and its model.

    `room` is what it changes so that its steps fit the machine.
    """

    resolved: ResolvedRecipe
    device: Choice[str]
    prepared: Prepared
    rows: Mapping[str, Rows]
    room: Room = field(default_factory=Room)

    @cached_property
    def splits(self) -> fingerprints.Splits:
        """A digest of the rows of each split. Raises UserError for a file that cannot be read, with its row."""
        return fingerprints.digest_rows(self.rows)

    def plan(self, output: Choice[Path], device: Choice[str] | None = None) -> Plan:
        """Return everything that a run in the folder `output` would do on `device`, by default the run's own.

        Raises UserError for an option that the device cannot honour.
        """
        recipe, device = self.resolved.recipe, device or self.device
        plan = decide(recipe, self.prepared, device, output, self.room)
        if self.resolved.smoke is not None:
            from hf_mps.finetune import smoke

            plan.choices["smoke"] = self.resolved.smoke
            smoke.explain(self.resolved, plan.choices)
        if recipe.fallback and device.value == "mps":
            reason = "they have no Metal kernel, and the recipe names them: no warning"
            plan.choices["on_the_cpu"] = Choice(", ".join(recipe.fallback), reason)
        if (sleep := caffeinate.decide()) is not None:
            plan.choices["sleep"] = sleep
        return plan


def locate(resolved: ResolvedRecipe, *, fresh: bool = False) -> tuple[Checkpoint, RunDir]:
    """Return the checkpoint that a run starts from, and the folder that it writes to; neither is touched.

    Every rank has the checkpoint; the main one chooses the folder, for all of them.

    Raises UserError for missing files and folders, for what `RunDir.choose` refuses, and where the hosts' folders
    differ. Imports no torch.
    """
    ranks = Ranks.here()
    ranks.alike(lambda: load.check(resolved.recipe.data))
    source = ranks.alike(lambda: checkpoint.resolve(resolved.recipe.model))
    run_dir = ranks.from_main(lambda: RunDir.choose(resolved, fresh=fresh))
    hosts.refuse_different(resolved, run_dir)
    return source, run_dir


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
        prepared = tasks.module(recipe.task).prepare(recipe, rows, source, device.value)
    run = PreparedRun(resolved, device, prepared, rows)
    if run_dir is not None:
        _check_whole(run, run_dir)
    return run


def _check_whole(run: PreparedRun, run_dir: RunDir) -> None:
    """Refuse what only a whole run refuses once rows and model are loaded; adds the choices about the rows."""
    from hf_mps.finetune.text import tokens

    recipe, prepared = run.resolved.recipe, run.prepared
    checks.refuse_unknown_operators(recipe.fallback)
    load.refuse_unread(run.rows, (*load.SPLITS, *prepared.further), recipe.task)
    expect.refuse_unmeasured(recipe, run.resolved.changed, prepared.reported)
    run_dir.refuse_other_rows(run.splits)
    sizes = " + ".join(str(one.stream or len(one.dataset)) for one in run.rows.values())
    where = "; ".join(f"{split}: {one.origin}" for split, one in run.rows.items())
    prepared.choices = {"data": Choice(f"{sizes} rows", where), **tokens.unknown_tokens(prepared), **prepared.choices}
