"""A target's training step: in real size without weights, or with weights on a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune import tasks
from hf_mps.finetune.data import load
from hf_mps.finetune.models import checkpoint, quantization
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.run.logging import errors_only, no_bars
from hf_mps.finetune.run.stages import PreparedRun, prepare_run
from hf_mps.finetune.smoke import smoke_recipe
from hf_mps.finetune.tasks import Prepared
from hf_mps.tools.dryrun import batch
from hf_mps.tools.dryrun.meta_model import MetaCheckpoint
from hf_mps.tools.dryrun.resolve import Target
from hf_mps.tools.dryrun.step import TrainingStep, make

MADE_UP = Choice("made up", "a few rows of the task's own: it is their shapes that count")
OF_THE_WHOLE = ("image_size", "max_target_length", "teacher")
"""Keys of the target's own recipe, which a smoke run has otherwise."""
METAL = Choice("mps", "the step is looked at as a Mac's GPU would take it")


@dataclass(frozen=True)
class Parts:
    """A run before a trainer is made of it; `facts` say what stands in for what, and why."""

    run: PreparedRun
    facts: dict[str, Choice[Any]]
    whole: Recipe
    """The target's own recipe, whose rows may be longer than those at hand."""

    @property
    def recipe(self) -> Recipe:
        """Return the recipe that the rows and the model were prepared for."""
        return self.run.resolved.recipe

    @property
    def prepared(self) -> Prepared:
        """Return the task's part."""
        return self.run.prepared


@contextmanager
def weightless(
    target: Target, device: str = "meta", *, on: Choice[str] = METAL, training: Mapping[str, Any] | None = None
) -> Iterator[Parts]:
    """The parts of `target` with its model in real size over made-up rows: on `meta` without weights, on `cpu` random.

    The step is looked at as the device `on` would take it, with another `training` section where that is given. Raises
    UserError where nothing tells the model's configuration, and what its task refuses.
    """
    whole = target.resolved.recipe
    task = tasks.find(whole.task)
    # Other libraries open a whole model's folder, whose parts are then exchanged.
    with smoke_recipe(target.resolved, weights=task.library != "transformers") as small, no_bars(), errors_only():
        size, told = task.size(whole)
        changes = {key: getattr(whole, key) for key in OF_THE_WHOLE if hasattr(whole, key)}
        changes["training"] = whole.training if training is None else training
        # A recipe that is only the frame of a model may say more tokens than that has positions.
        said, positions = getattr(whole, "max_length", None), getattr(size, "max_position_embeddings", None)
        free = "recipe" in target.facts and "max_length" not in target.resolved.changed
        if free and said and positions and 0 < positions < said:  # XLNet's -1 is no limit
            changes["max_length"] = positions
        recipe = small.recipe.model_copy(update=changes)
        source = MetaCheckpoint(whole.model, small.recipe.model, local=True, size=size, device=device)
        run = prepare_run(replace(small, recipe=recipe), source, device=on)
        count = quantization.parameters(run.prepared.model)
        model = Choice(f"{told.value}, {count / 1e6:,.1f} M parameters", told.reason)
        gc.freeze()  # each step ends with a full collection, which then leaves the libraries alone
        try:
            yield Parts(run, {**target.facts, "model": model, "rows": MADE_UP}, whole)
        finally:
            gc.unfreeze()


@contextmanager
def with_weights(target: Target, device: Choice[str]) -> Iterator[Parts]:
    """The parts of `target` with its own model and rows, or where those cannot be had, with small stand-ins.

    Raises UserError for what its task refuses.
    """
    recipe = target.resolved.recipe
    with no_bars(), errors_only():
        try:
            load.check(recipe.data)
            source = checkpoint.resolve(recipe.model)
            source.config()
            run = prepare_run(target.resolved, source, device=device)
        except UserError as error:
            missing = ("is not in the local cache", "cannot be had from the hub")  # as opposed to said wrongly
            if not any(words in str(error) for words in missing):
                raise
        else:
            yield Parts(run, {**target.facts, "model": run.prepared.choices["model"]}, recipe)
            return
        with small(target, device) as parts:
            yield parts


@contextmanager
def small(target: Target, device: Choice[str]) -> Iterator[Parts]:
    """The parts of a smoke run of `target`: a tiny model of the same architecture with random weights, made-up rows."""
    with smoke_recipe(target.resolved) as tiny, no_bars(), errors_only():
        run = prepare_run(tiny, checkpoint.resolve(tiny.recipe.model), device=device)
        model = Choice(target.resolved.recipe.model, "a tiny model of the same architecture, with random weights")
        yield Parts(run, {**target.facts, "model": model, "rows": MADE_UP}, target.resolved.recipe)


def step(
    parts: Parts, device: Choice[str], *, fake: bool, changes: Mapping[str, Any] | None = None, **shape: Any
) -> TrainingStep:
    """The training step of `parts`; `shape` is `shape_batches`'s. Raises UserError for what the runner refuses."""
    # What the runner's own callbacks keep is real, and may meet the step's tensors.
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    made = make(parts.run, device, fake=mode, changes=changes)
    made.facts = {**parts.facts, **made.facts}
    shape_batches(made, parts.prepared, **shape)
    return made


def shape_batches(
    step: TrainingStep,
    prepared: Prepared,
    *,
    rows: int | None = None,
    wide: batch.Width = batch.Width(),  # noqa: B008  frozen
    steps: int = 1,
) -> None:
    """Give it the batches of `steps`: of `rows` (default: the plan's), as wide as `wide` (default: as they are)."""
    arguments, mode = step.trainer.args, step.fake
    size = rows or arguments.per_device_train_batch_size
    each = range(arguments.gradient_accumulation_steps * steps)
    found = [batch.collate(prepared, step.trainer, size, wide, first=size * number) for number in each]
    step.batches = found
    if mode is not None:
        step.batches = tree_map_only(torch.Tensor, mode.from_tensor, found)
        both = zip(tree_leaves(step.batches), tree_leaves(found), strict=True)
        step.numbers = [pair for pair in both if isinstance(pair[0], torch.Tensor)]
