"""The moments at which a guard can look at what is to be trained, the same in every loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from hf_mps.guards.base import Guard, around


def parameters(guard: Guard, module: ModuleType, look: Callable[[list[Any]], None], *, frozen: bool = False) -> None:
    """Let `look` see the trainable parameters that lie on the device, before the first step; `frozen` ones too.

    After torch.optim.Optimizer was made, in any loop (`module` torch); after Accelerate has moved a model, whose
    optimizer may have been made before (`module` accelerate.accelerator); and after Lightning has one
    (…strategies.strategy). The last two see what no optimizer has, frozen parameters.
    """

    def optimizer_made(stock: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        stock(optimizer, *args, **kwargs)
        tell(parameter for group in optimizer.param_groups for parameter in group["params"])

    def model_prepared(stock: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = stock(accelerator, model, *args, **kwargs)
        tell(model.parameters())
        return prepared

    def tell(found: Any) -> None:
        wanted = (parameter for parameter in found if frozen or parameter.requires_grad)
        there = [parameter for parameter in wanted if parameter.device.type == "mps"]
        if there and not Guard.trying:
            look(there)

    def model_moved(stock: Callable[..., None], strategy: Any, *args: Any, **kwargs: Any) -> None:
        stock(strategy, *args, **kwargs)
        tell(strategy.model.parameters())

    if module.__name__ == "torch":
        around(guard, module.optim.Optimizer, "__init__", optimizer_made)
    elif hasattr(module, "Strategy"):
        around(guard, module.Strategy, "setup_optimizers", model_moved)
    else:
        around(guard, module.Accelerator, "prepare_model", model_prepared)


def steps(guard: Guard, look: Callable[[], None]) -> None:
    """Let `look` run after each step of an optimizer whose first parameter lies on the device, in any loop."""
    from torch.compiler import is_compiling
    from torch.optim.optimizer import register_optimizer_step_post_hook  # torch.optim hides its modules

    def stepped(optimizer: Any, *_: Any) -> None:
        first = next((each for group in optimizer.param_groups for each in group["params"]), None)
        if first is not None and first.device.type == "mps" and not Guard.trying and not is_compiling():
            guard.safely(look)

    # It stays, as no hook can take itself away while others are called; `safely` asks whether the guard is on.
    register_optimizer_step_post_hook(stepped)


def batches(guard: Guard, module: ModuleType, change: Callable[[Any], Any]) -> None:
    """Let `change` replace each batch of CPU tensors that is about to be moved to the device.

    In accelerate's data loaders, which Trainer has too (`module` accelerate.accelerator), in Trainer's own move of
    what did not come through one (`module` transformers.trainer), and in Lightning's (`module` …strategies.strategy).
    """
    _at_moves(guard, module, lambda move, batch: move(change(batch)))


def moves(guard: Guard, module: ModuleType, within: Callable[[Any], AbstractContextManager[Any]]) -> None:
    """Have each batch that is moved to the device be moved within `within(batch)`; in the same places as `batches`."""

    def moved(move: Callable[[Any], Any], batch: Any) -> Any:
        with within(batch):
            return move(batch)

    _at_moves(guard, module, moved)


def _at_moves(guard: Guard, module: ModuleType, moved: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have `moved(move, batch)` make each move of a batch to the device."""

    def sent(stock: Callable[..., Any], batch: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(device, "type", str(device).partition(":")[0]) != "mps":
            return stock(batch, device, *args, **kwargs)
        return moved(lambda given: stock(given, device, *args, **kwargs), batch)

    def prepared(stock: Callable[..., Any], trainer: Any, inputs: Any) -> Any:
        if trainer.args.device.type != "mps":
            return stock(trainer, inputs)
        return moved(lambda given: stock(trainer, given), inputs)

    def by_lightning(
        stock: Callable[..., Any], strategy: Any, batch: Any, device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        there = device or strategy.root_device
        if there.type != "mps":
            return stock(strategy, batch, device, *args, **kwargs)
        return moved(lambda given: stock(strategy, given, device, *args, **kwargs), batch)

    if module.__name__ == "transformers.trainer":
        around(guard, module.Trainer, "_prepare_inputs", prepared)
    elif hasattr(module, "Strategy"):
        around(guard, module.Strategy, "batch_to_device", by_lightning)
    else:
        import accelerate.data_loader

        around(guard, accelerate.data_loader, "send_to_device", sent)
