"""A target's training step: in real size without weights, or with weights on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.dryrun import batch, known_configs
from hf_mps.dryrun.resolve import Target
from hf_mps.finetune import metrics, smoke, tasks
from hf_mps.finetune.data import load
from hf_mps.finetune.models import checkpoint

if TYPE_CHECKING:
    from hf_mps.dryrun.step import TrainingStep
    from hf_mps.finetune.tasks._base import Prepared

# sentence-transformers opens a whole model's folder, whose parts are then exchanged.
OF_A_FOLDER = ("sentence-embeddings",)
MADE_UP = Choice("made up", "a few rows of the task's own: it is their shapes that count")


@dataclass(frozen=True)
class Parts:
    """A recipe's parts before a trainer is made of them; `facts` say what stands in for what, and why."""

    recipe: Any
    prepared: Prepared
    facts: dict[str, Choice[Any]]


@contextmanager
def weightless(target: Target, device: str = "meta") -> Iterator[Parts]:
    """The parts of `target` with its model in real size over made-up rows: on `meta` without weights, on `cpu` random.

    Raises UserError where nothing tells the model's configuration, and what its task refuses.
    """
    from hf_mps.dryrun.meta_model import Weightless
    from hf_mps.finetune.run.logging import errors_only, no_bars

    weights = target.order.recipe.task in OF_A_FOLDER
    with smoke.order(target.order, weights=weights) as small, no_bars(), errors_only():
        size, told = known_configs.config(target.order.recipe)
        recipe = small.recipe.model_copy(update={"training": target.order.recipe.training, **_framed(target, size)})
        source = Weightless(target.order.recipe.model, small.recipe.model, local=True, size=size, device=device)
        prepared = _prepare(recipe, source, "mps")
        count = sum(parameter.numel() for parameter in prepared.model.parameters())
        model = Choice(f"{told.value}, {count / 1e6:,.1f} M parameters", told.reason)
        yield Parts(recipe, prepared, {**target.facts, "model": model, "rows": MADE_UP})


@contextmanager
def with_weights(target: Target, device: str) -> Iterator[Parts]:
    """The parts of `target` with its own model and rows, or where those cannot be had, with small stand-ins.

    Raises UserError for what its task refuses.
    """
    from hf_mps.finetune.run.logging import errors_only, no_bars

    order = target.order
    with no_bars(), errors_only():
        try:
            load.check(order.recipe.data)
            source = checkpoint.resolve(order.recipe.model)
            source.config()
            prepared = _prepare(order.recipe, source, device)
        except UserError as error:
            if not _out_of_reach(error):
                raise
        else:
            yield Parts(order.recipe, prepared, {**target.facts, "model": prepared.choices["model"]})
            return
        with small(target, device) as parts:
            yield parts


@contextmanager
def small(target: Target, device: str) -> Iterator[Parts]:
    """The parts of a smoke run of `target`: a tiny model of the same architecture with random weights, made-up rows."""
    from hf_mps.finetune.run.logging import errors_only, no_bars

    with smoke.order(target.order) as order, no_bars(), errors_only():
        prepared = _prepare(order.recipe, checkpoint.resolve(order.recipe.model), device)
        model = Choice(target.order.recipe.model, "a tiny model of the same architecture, with random weights")
        yield Parts(order.recipe, prepared, {**target.facts, "model": model, "rows": MADE_UP})


def step(
    parts: Parts, device: Choice[str], *, fake: bool, changes: Mapping[str, Any] | None = None, **shape: Any
) -> TrainingStep:
    """The training step of `parts`; `shape` is `shape_batches`'s. Raises UserError for what the runner refuses."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_mps.dryrun.step import make

    # What the runner's own callbacks keep is real, and may meet the step's tensors.
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    made = make(parts.recipe, parts.prepared, device, fake=mode, changes=changes)
    made.facts = {**parts.facts, **made.facts}
    shape_batches(made, parts.prepared, **shape)
    return made


def shape_batches(
    made: TrainingStep,
    prepared: Prepared,
    *,
    rows: int | None = None,
    wide: batch.Width = batch.Width(),  # noqa: B008  frozen
    steps: int = 1,
) -> None:
    """Give it the batches of `steps`: of `rows` (default: the plan's), as wide as `wide` (default: as they are)."""
    import torch
    from torch.utils._pytree import tree_map

    from hf_mps.dryrun.step import leaves

    arguments, mode = made.trainer.args, made.fake
    size = rows or arguments.per_device_train_batch_size
    each = range(arguments.gradient_accumulation_steps * steps)
    found = [batch.collate(prepared, made.trainer, size, wide, first=size * number) for number in each]
    made.batches = found
    if mode is not None:
        made.batches = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, found)
        made.numbers = list(zip(leaves(made.batches), leaves(found), strict=True))


def _framed(target: Target, config: Any) -> dict[str, int]:
    """The tokens of a row, where a recipe that is only the frame of a model says more than that has positions."""
    said, positions = getattr(target.order.recipe, "max_length", None), getattr(config, "max_position_embeddings", None)
    if "recipe" not in target.facts or not said or not positions or "max_length" in target.order.changed:
        return {}
    return {"max_length": positions} if 0 < positions < said else {}  # XLNet's -1 is no limit


def _prepare(recipe: Any, source: checkpoint.Checkpoint, device: str) -> Prepared:
    from transformers import set_seed

    task = tasks.module(recipe.task)
    set_seed(recipe.seed)
    rows = load.load(recipe.data, recipe.seed)
    with metrics.unmeasured():
        found: Prepared = task.prepare(recipe, rows, source, device)
    return found


def _out_of_reach(error: UserError) -> bool:
    """Whether something of the hub cannot be had, as opposed to something said wrongly."""
    return "is not in the local cache" in str(error) or "cannot be had from the hub" in str(error)
