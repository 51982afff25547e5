"""The moments at which a guard can look at what is to be trained, the same in every loop: patches to declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from hf_mps.core.patching import Patch, Register, in_lightning
from hf_mps.layer.guards.base import Guard

Patches = dict[str, str | Patch]
STEPPED = "torch.optim.optimizer:register_optimizer_step_post_hook"
MODEL_PREPARED = "accelerate.accelerator:Accelerator.prepare_model"
MODEL_SET_UP = "strategies.strategy:Strategy.setup_optimizers"


def parameters(method: str, *, frozen: bool = False, lightning: bool = False) -> Patches:
    """Let `method` see the trainable parameters that lie on the device, before the first step; `frozen` ones too.

    After torch.optim.Optimizer was made, in any loop; after Accelerate has moved a model, whose optimizer may have been
    made before; and after Lightning has one. The last two see what no optimizer has, frozen parameters.
    """

    def after(given: Callable[..., Iterable[Any]]) -> Patch:
        """Show what `given(*arguments)` yields once the library's function is through."""

        def called(look: Callable[[list[Any]], None], stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            trained = (each for each in given(*args, **kwargs) if frozen or each.requires_grad)
            there = [each for each in trained if each.device.type == "mps"]
            if there and not Guard.trying:
                look(there)
            return result

        return Patch(method, through=called)

    def in_groups(optimizer: Any, *_: Any, **__: Any) -> Iterable[Any]:
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    patches: Patches = {
        "torch.optim:Optimizer.__init__": after(in_groups),
        MODEL_PREPARED: after(lambda accelerator, model, *_, **__: model.parameters()),
    }
    if lightning:
        patches |= in_lightning({MODEL_SET_UP: after(lambda strategy, *_, **__: strategy.model.parameters())})
    return patches


def after_steps(method: str) -> Patches:
    """Call `method()` after each step of an optimizer whose first parameter is on the device, and that trains in
    earnest.

    The hook stays, as none can take itself away while others are called; whether the guard is on is asked each time.
    """

    def stepped(ours: Any, optimizer: Any, *_: Any) -> None:
        from torch.compiler import is_compiling

        first = next((each for group in optimizer.param_groups for each in group["params"]), None)
        if first is not None and first.device.type == "mps" and not Guard.trying and not is_compiling():
            # torch calls a hook itself: nothing else catches a fault of ours here.
            ours.__self__.safely(ours)

    return {STEPPED: Register(method, through=stepped)}


def batches(method: str) -> Patches:
    """Let `method` replace each batch of CPU tensors that is about to be moved to the device.

    In accelerate's data loaders, which Trainer has too, in Trainer's own move of what did not come through one, and in
    Lightning's.
    """
    return _at_moves(method, lambda change, move, batch: move(change(batch)))


def moves(method: str) -> Patches:
    """Have each batch that is moved to the device be moved within `method(batch)`; in the same places as `batches`."""

    def moved(within: Callable[[Any], AbstractContextManager[Any]], move: Callable[[Any], Any], batch: Any) -> Any:
        with within(batch):
            return move(batch)

    return _at_moves(method, moved)


def _at_moves(method: str, moved: Callable[..., Any]) -> Patches:
    """Have `moved(method, move, batch)` make each move of a batch to the device."""

    def at(place: int, device: Callable[..., str], **settings: Any) -> Patch:
        """Around a function whose argument number `place` is the batch, and that moves it to `device(*arguments)`."""

        def moving(ours: Callable[..., Any], stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # A batch that was given by name is moved as stock does.
            if len(args) <= place or device(*args, **kwargs) != "mps":
                return stock(*args, **kwargs)
            before, behind = args[:place], args[place + 1 :]
            return moved(ours, lambda given: stock(*before, given, *behind, **kwargs), args[place])

        return Patch(method, through=moving, **settings)

    def sent(batch: Any, device: Any = None, *_: Any, **__: Any) -> str:
        return str(getattr(device, "type", str(device).partition(":")[0]))

    def by_lightning(strategy: Any, batch: Any, device: Any = None, *_: Any, **__: Any) -> str:
        return str((device or strategy.root_device).type)

    return {
        "accelerate.data_loader:send_to_device": at(0, sent, after="accelerate.accelerator"),
        "transformers.trainer:Trainer._prepare_inputs": at(1, lambda trainer, *_: str(trainer.args.device.type)),
        **in_lightning({"strategies.strategy:Strategy.batch_to_device": at(1, by_lightning)}),
    }
