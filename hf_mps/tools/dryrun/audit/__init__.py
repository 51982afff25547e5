"""`hf-mps audit`: which operators of a training step have a Metal kernel, without a Mac and without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.text import summary
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.smoke.fake import needs_numbers
from hf_mps.layer.activation import run
from hf_mps.metal.operators.launch_class import LaunchTable
from hf_mps.metal.operators.table import OperatorSupport
from hf_mps.tools.dryrun import layers, metal_device
from hf_mps.tools.dryrun.audit.record import Audit, OperatorRecorder, audit_of
from hf_mps.tools.dryrun.launches import asked_for, table_of
from hf_mps.tools.dryrun.modules import BETWEEN, OPTIMIZER, ModuleTracker
from hf_mps.tools.dryrun.resolve import Target

FAKE = Choice("fake", "the first step, which makes the optimizer's state, in real size without numbers and memory")
TRACED = 2
"""Batches of a step that are looked at: the first finds no gradients, every other one adds to them as the second."""
OF_A_SCRIPT = Choice("real", "the script's own, from its start to the end of its first optimizer step")


def audit(target: Target, torch_table: Path | None = None, release: str | None = None) -> Audit:
    """Look at one training step of `target`, in real size with fake tensors; where those cannot run, a small real one.

    `release` is the PyTorch that it is asked for, by default the installed one; `torch_table` is another one's
    native_functions.yaml, which says nothing of launches. Raises UserError for what cannot be looked at.
    """
    device, (training, accumulated) = metal_device(), _traced(target.resolved.recipe)
    # Not at the head: they import transformers, for which a script that is looked at may still set variables.
    from hf_mps.tools.dryrun import prepare
    from hf_mps.tools.dryrun.step import generates, model_errors, models_of

    support, launches = _tables(torch_table, release)
    facts = {"device": device, **asked_for(release, launches), **accumulated}

    def audited(parts: prepare.Parts, tensors: Choice[str]) -> Audit:
        step = prepare.step(parts, device, fake=tensors is FAKE)
        shorter = layers.cut(*models_of(parts.prepared)) if tensors is FAKE and not generates(step.trainer) else None

        def recorded(kept: layers.Kept) -> OperatorRecorder:
            recorded_step = step if shorter is None else prepare.step(parts, device, fake=True)
            recorder = OperatorRecorder(recorded_step.tracker)
            with layers.few(kept, *models_of(parts.prepared)):
                recorded_step.run(1, watch=[recorder])
            return recorder

        def whole(cut: layers.Cut | None) -> OperatorRecorder:
            base = recorded(cut.base if cut else {})
            return base.of_all([(recorded(kept), lacking) for kept, lacking in cut.more]) if cut else base

        recorder = layers.told(whole, shorter)
        return audit_of(target.name, recorder, support, {**facts, **step.facts, "tensors": tensors}, launches)

    with model_errors(target.resolved):
        with prepare.weightless(target, training=training) as parts:
            try:
                return audited(parts, FAKE)
            except Exception as error:
                if not needs_numbers(error):
                    raise
                why = summary(error)
        real = f"a small real step; fake tensors cannot run this one: {why}"
        try:
            with prepare.small(target, device) as parts:
                return audited(parts, Choice("real", real))
        except UserError as error:
            raise UserError(f"this takes {real}; {str(error).removeprefix('--smoke: ')}") from error


def _tables(torch_table: Path | None, release: str | None) -> tuple[OperatorSupport, LaunchTable | Choice[None] | None]:
    """What has a kernel, and what calls launch. Raises UserError for two releases, and for one that is not known."""
    if torch_table is not None:
        if release is not None:
            raise UserError("--torch and --torch-table are two ways to name a release; give one of them")
        return OperatorSupport(torch_table), None
    launches = table_of(release)
    of_release = launches if release is not None and isinstance(launches, LaunchTable) else None
    return OperatorSupport(launches=of_release), launches


def _traced(recipe: Recipe) -> tuple[Mapping[str, Any], dict[str, Choice[str]]]:
    """Return a recipe's `training` with at most `TRACED` batches a step, and the fact where there are more.

    GRPO's groups of completions fill all batches of a step together: they become as small.
    """
    training = recipe.training
    batches = training.get("gradient_accumulation_steps") or 1
    if batches <= TRACED:
        return training, {}
    reason = "the others of a step call what the second does; they are not counted"
    less = {"gradient_accumulation_steps": TRACED}
    if tasks.find(recipe.task).in_groups:
        less["num_generations"] = TRACED * (training.get("per_device_train_batch_size") or 1)
    return {**training, **less}, {"accumulation": Choice(f"{TRACED} of {batches} batches", reason)}


class _Stepped(BaseException):
    """The first optimizer step is taken. It is no Exception, which a script might catch."""


def audit_script(words: Sequence[str], torch_table: Path | None = None, release: str | None = None) -> Audit:
    """Run the script of the command line `words` until its first optimizer step; what it called on the device.

    What came before the step (moving the model, an evaluation) counts as well. The script's own files and words stay
    what they are. Raises UserError for a command that names no script, RunError where it ends without a step.
    """
    device, tracker = metal_device(), ModuleTracker()
    support, launches = _tables(torch_table, release)
    recorder, script = OperatorRecorder(tracker), run.prepare(words)

    def before(*_: Any) -> None:
        tracker.phase = OPTIMIZER

    def after(*_: Any) -> None:
        tracker.phase = BETWEEN
        raise _Stepped

    first, last = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        with first, last, tracker, recorder:
            run.start(script)
    except _Stepped:
        facts = {"device": device, **asked_for(release, launches), "tensors": OF_A_SCRIPT}
        return audit_of(" ".join(words), recorder, support, facts, launches)
    except UserError:
        raise
    # argparse and scripts themselves end by sys.exit, which is no Exception.
    except (Exception, SystemExit) as error:
        raise RunError(f"the script ended before its first optimizer step: {summary(error)}") from error
    raise RunError("the script ended and took no optimizer step; next: a command that trains")
