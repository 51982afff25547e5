"""The moments at which a guard can look at what is to be trained, the same in every loop: patches to declare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hf_mps.core.patching import Patch, in_lightning
from hf_mps.layer.guards.base import Guard

Patches = dict[str, str | Patch]
Look = Callable[[list[Any]], None]
Change = Callable[[Any], Any]
Move = Callable[[Callable[[Any], Any], Any], Any]
STEPPED = "torch.optim.optimizer:register_optimizer_step_post_hook"
MODEL_PREPARED = "accelerate.accelerator:Accelerator.prepare_model"
MODEL_SET_UP = "strategies.strategy:Strategy.setup_optimizers"


def parameters(method: str, *, frozen: bool = False, lightning: bool = False) -> Patches:
    """Let `method` see the trainable parameters that lie on the device, before the first step; `frozen` ones too.

    After torch.optim.Optimizer was made, in any loop; after Accelerate has moved a model, whose optimizer may have been
    made before; and after Lightning has one. The last two see what no optimizer has, frozen parameters.
    """
    patches: Patches = {
        "torch.optim:Optimizer.__init__": Patch(method, through=partial(_optimizer_made, frozen)),
        MODEL_PREPARED: Patch(method, through=partial(_model_prepared, frozen)),
    }
    if lightning:
        patches |= in_lightning({MODEL_SET_UP: Patch(method, through=partial(_model_moved, frozen))})
    return patches


def _optimizer_made(frozen: bool, look: Look) -> Callable[..., None]:
    def optimizer_made(stock: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        stock(optimizer, *args, **kwargs)
        _show((parameter for group in optimizer.param_groups for parameter in group["params"]), look, frozen)

    return optimizer_made


def _model_prepared(frozen: bool, look: Look) -> Callable[..., Any]:
    def model_prepared(stock: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = stock(accelerator, model, *args, **kwargs)
        _show(model.parameters(), look, frozen)
        return prepared

    return model_prepared


def _model_moved(frozen: bool, look: Look) -> Callable[..., None]:
    def model_moved(stock: Callable[..., None], strategy: Any, *args: Any, **kwargs: Any) -> None:
        stock(strategy, *args, **kwargs)
        _show(strategy.model.parameters(), look, frozen)

    return model_moved


def _show(parameters: Any, look: Look, frozen: bool) -> None:
    trained = (parameter for parameter in parameters if frozen or parameter.requires_grad)
    there = [parameter for parameter in trained if parameter.device.type == "mps"]
    if there and not Guard.trying:
        look(there)


def steps_on_metal(optimizer: Any) -> bool:
    """Return whether the optimizer that has just stepped has its first parameter on the device, and trains in earnest.

    For a guard's method that is registered at STEPPED: it stays, as no hook can take itself away while others are
    called, so that it calls the rest by `safely`, which asks whether the guard is on.
    """
    from torch.compiler import is_compiling

    first = next((each for group in optimizer.param_groups for each in group["params"]), None)
    return first is not None and first.device.type == "mps" and not Guard.trying and not is_compiling()


def batches(method: str) -> Patches:
    """Let `method` replace each batch of CPU tensors that is about to be moved to the device.

    In accelerate's data loaders, which Trainer has too, in Trainer's own move of what did not come through one, and in
    Lightning's.
    """
    return _at_moves(method, _changed)


def _changed(change: Change) -> Move:
    return lambda move, batch: move(change(batch))


def moves(method: str) -> Patches:
    """Have each batch that is moved to the device be moved within `method(batch)`; in the same places as `batches`."""
    return _at_moves(method, _within)


def _within(within: Callable[[Any], AbstractContextManager[Any]]) -> Move:
    def moved(move: Callable[[Any], Any], batch: Any) -> Any:
        with within(batch):
            return move(batch)

    return moved


def _at_moves(method: str, how: Callable[[Any], Move]) -> Patches:
    """Have `how(method)(move, batch)` make each move of a batch to the device."""
    return {
        "accelerate.data_loader:send_to_device": Patch(
            method, after="accelerate.accelerator", through=lambda ours: _sent(how(ours))
        ),
        "transformers.trainer:Trainer._prepare_inputs": Patch(method, through=lambda ours: _prepared(how(ours))),
        **in_lightning(
            {
                "strategies.strategy:Strategy.batch_to_device": Patch(
                    method, through=lambda ours: _by_lightning(how(ours))
                )
            }
        ),
    }


def _sent(moved: Move) -> Callable[..., Any]:
    def sent(stock: Callable[..., Any], batch: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(device, "type", str(device).partition(":")[0]) != "mps":
            return stock(batch, device, *args, **kwargs)
        return moved(lambda given: stock(given, device, *args, **kwargs), batch)

    return sent


def _prepared(moved: Move) -> Callable[..., Any]:
    def prepared(stock: Callable[..., Any], trainer: Any, inputs: Any) -> Any:
        if trainer.args.device.type != "mps":
            return stock(trainer, inputs)
        return moved(lambda given: stock(trainer, given), inputs)

    return prepared


def _by_lightning(moved: Move) -> Callable[..., Any]:
    def by_lightning(
        stock: Callable[..., Any], strategy: Any, batch: Any, device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        there = device or strategy.root_device
        if there.type != "mps":
            return stock(strategy, batch, device, *args, **kwargs)
        return moved(lambda given: stock(strategy, given, device, *args, **kwargs), batch)

    return by_lightning
