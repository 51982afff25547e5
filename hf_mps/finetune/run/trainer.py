"""The Trainer of a recipe: a class of transformers, TRL or sentence-transformers, with what the run's features set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_mps.finetune.run.evaluation import ExactEvaluation
from hf_mps.finetune.run.missed_evaluation import MissedEvaluation
from hf_mps.finetune.run.stop_checkpoints import StopCheckpoints


class StepMethod:
    """How a trainer takes a training step: as its class does.

    A feature that takes steps otherwise overrides some of these methods. `stock` is always the trainer's own method.
    """

    def training_step(self, stock: Callable[..., Any], model: Any, inputs: Any, items: Any) -> Any:
        """Return the loss of a batch, whose gradients are then in the model. `items` is `num_items_in_batch`."""
        return stock(model, inputs, items)

    def clip_grad_norm(self, stock: Callable[..., Any], model: Any) -> Any:
        """Clip the gradients and return their norm before that; None where there is nothing to clip any more."""
        return stock(model)

    def grad_norm(self, stock: Callable[..., Any], model: Any, norm: Any) -> Any:
        """Return the norm that is logged. `norm` is what `clip_grad_norm` returned."""
        return stock(model, grad_norm=norm)

    def floating_point_ops(self, stock: Callable[..., int], inputs: Any) -> int:
        """Return the operations that Trainer counts for a batch."""
        return stock(inputs)


class RecipeTrainer(StopCheckpoints, MissedEvaluation, ExactEvaluation):
    """A mixin before a Trainer class. Where no feature sets anything, training is that of the class itself."""

    step_method = StepMethod()
    train_loader: Any = None
    """The training batches, in place of the class's own loader."""
    train_sampler: Callable[[], Any] | None = None
    """Makes the sampler of training rows, in place of the class's own."""

    interruption: Any = None
    """What saves a checkpoint that was due behind an evaluation that fails (`run.interrupt`)."""

    def get_train_dataloader(self) -> Any:
        """Return what the training loop takes its batches from."""
        if self.train_loader is not None:
            return self.train_loader
        return super().get_train_dataloader()  # type: ignore[misc]

    def _get_train_sampler(self, *arguments: Any, **settings: Any) -> Any:
        if self.train_sampler is not None:
            return self.train_sampler()
        return super()._get_train_sampler(*arguments, **settings)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Take a step as Trainer.training_step does."""
        return self.step_method.training_step(super().training_step, model, inputs, num_items_in_batch)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.step_method.clip_grad_norm(super()._clip_grad_norm, model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.step_method.grad_norm(super()._get_grad_norm, model, grad_norm)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a batch as Trainer counts them."""
        return self.step_method.floating_point_ops(super().floating_point_ops, inputs)  # type: ignore[misc]

    def _evaluate(self, *arguments: Any, **settings: Any) -> Any:
        stock = super()._evaluate  # type: ignore[misc]
        if self.interruption is None:
            return stock(*arguments, **settings)
        return self.interruption.keep_before(stock, *arguments, **settings)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if hasattr(self.train_loader, "save"):
            self.train_loader.save(output_dir)


def recipe_trainer(kind: type[Any] | None = None) -> type[Any]:
    """Return the subclass of a Trainer class (None: transformers' own) that a recipe is trained with."""
    from transformers import Trainer

    stock = kind or Trainer
    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(stock.__name__, (RecipeTrainer, stock), names)


def trainer_class(trainer: Any) -> type[Any]:
    """Return the Trainer class behind `RecipeTrainer`: the one that a task named."""
    return next(kind for kind in type(trainer).__mro__[1:] if not issubclass(RecipeTrainer, kind))
