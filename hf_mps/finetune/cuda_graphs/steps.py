"""Trainer's steps as CUDA graphs: Trainer's own loop and its own `training_step`, recorded once for each shape."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.finetune.cuda_graphs.graphs import MOST, Graphs, RecordingFailed, Unmasked, as_they_are
from hf_mps.finetune.cuda_graphs.reduction import Reduction, obstacle
from hf_mps.finetune.run.trainer import StepMethod

WHOLE = "whole steps"
PASSES = "forward and backward passes"
FIRST = "the first step, which loads kernels and makes the optimizer's state"
SECOND = "the second step, in which the ranks first send each other the gradients themselves"
ITEMS = "num_items_in_batch"
PLAIN = (bool, int, float, str, type(None))


def with_capture(trainer: Any, capture: StepCapture) -> None:
    """Let `capture` do the steps of a `RecipeTrainer`."""
    trainer.step_method = capture
    trainer.data_collator = Unmasked(trainer.data_collator)


@contextmanager
def _buffers_stay(model: Any) -> Iterator[None]:
    """Raise RecordingFailed where a model puts another tensor in a buffer's place, and give it the first one back.

    A tensor made while a step is recorded lies in the graphs' memory and holds nothing yet; a model that keeps it for
    later steps (a table of positions that has grown) would read what another graph leaves there.
    """
    before = [(module, name, tensor) for module in model.modules() for name, tensor in module._buffers.items()]
    yield
    replaced = [(module, name, tensor) for module, name, tensor in before if module._buffers.get(name) is not tensor]
    for module, name, tensor in replaced:
        module._buffers[name] = tensor
    if replaced:
        raise RecordingFailed(f"the model replaces its buffer {replaced[0][1]} within a step")


class StepCapture(StepMethod):
    """One training's graphs, and the account of what they did. `required`: a step that cannot be recorded ends the run.

    A whole step (one batch, a fused Adam, no GradScaler) is one graph: forward, backward, clipping, optimizer; when the
    loop then clips and steps, it finds that done. Otherwise a graph holds forward and backward, and adds to gradients
    that stay where they are.

    Nothing is tried out on the weights: the first step runs eagerly and counts, and a recording computes nothing.
    """

    def __init__(self, trainer: Any, graphs: Graphs, *, required: bool = False) -> None:
        self._trainer, self._graphs, self._required = trainer, graphs, required
        self._whole: Choice[bool] | None = None
        self._reduction: Reduction | None = None
        self._rates: list[Tensor] = []
        self._kept: list[tuple[Any, Tensor]] = []
        self._flos: dict[Any, int] = {}
        self._failure = ""
        self.stepped = False
        """Whether the graph that ran last has clipped and stepped already, and the loop has not asked for it yet."""
        self.norm: Tensor | None = None
        """The gradients' norm before clipping, of that step."""
        self.replayed = 0
        self.eager: Counter[str] = Counter()

    def training_step(self, stock: Callable[..., Tensor], model: Any, inputs: Any, items: Any) -> Tensor:
        """Do as Trainer.training_step does, or all that the loop does until the next batch."""
        self.stepped = False
        if self._whole is None:
            loss = self._eagerly(FIRST, stock, model, inputs, items)
            self._whole = self._decide(model)
            self._share(model)
            return loss
        if self._reduction is not None:
            stock = self._reduction.around(stock)
            self._reduction.share_buffers()
            if SECOND not in self.eager:
                return self._eagerly(SECOND, stock, model, inputs, items)
        key, tensors, others = self._key(model, inputs, items)
        why = self._failure or (key is None and others) or ""
        if not why and not self._graphs.takes(key):
            why = f"more than {MOST} shapes"
        if why:
            return self._eagerly(why, stock, model, inputs, items)
        try:
            loss = self._by_graph(stock, model, key, tensors, others)
        except RecordingFailed as error:
            if self._whole.value:  # as a step begins
                model.zero_grad()
            self._failed(str(error))
            return self._eagerly(self._failure, stock, model, inputs, items)
        self.replayed += 1
        return loss

    def clip_grad_norm(self, stock: Callable[..., Any], model: Any) -> Any:
        """Clip, unless the graph has."""
        return None if self.stepped else stock(model)

    def grad_norm(self, stock: Callable[..., Any], model: Any, norm: Any) -> Any:
        """Return the graph's norm, or else the loop's."""
        return self.norm if self.stepped else stock(model, grad_norm=norm)

    def floating_point_ops(self, stock: Callable[..., int], inputs: Any) -> int:
        """Return what Trainer counts for `inputs`, which depends on the shape of the main one alone."""
        main = inputs.get(getattr(self._trainer.model, "main_input_name", "input_ids"))
        if not isinstance(main, Tensor):
            return stock(inputs)
        if main.shape not in self._flos:
            self._flos[main.shape] = stock(inputs)
        return self._flos[main.shape]

    def outcome(self) -> Choice[str]:
        """Return what ran as graphs, in words for the header's row of a finished run."""
        total = self.replayed + self.eager.total()
        value = WHOLE if self._whole is not None and self._whole.value else PASSES
        why = "; ".join(f"{count} without: {reason}" for reason, count in self.eager.items())
        if not self.replayed:
            return Choice("none", why)
        shapes = len(self._graphs)
        told = f"{self.replayed} of {total} batches by {shapes} graph{'s' * (shapes != 1)}, one for each shape"
        kept_out = f"; {self._whole.reason}" if self._whole is not None and self._whole.reason else ""
        return Choice(value, f"{told}; {why}{kept_out}")

    def close(self) -> None:
        """Drop the graphs, whose memory what follows the training may need."""
        self._graphs.clear()
        self._kept.clear()
        if self._reduction is not None:
            self._reduction.close()
        self.stepped, self.norm = False, None
        vars(self._trainer.model_wrapped).pop("zero_grad", None)

    def _eagerly(self, reason: str, stock: Callable[..., Tensor], model: Any, inputs: Any, items: Any) -> Tensor:
        self.eager[reason] += 1
        return stock(model, inputs, items)

    def _failed(self, why: str) -> None:
        """Run eagerly from now on."""
        self._failure = why
        self._graphs.clear()
        if self._required:
            raise RunError(f"cuda_graphs is true, and {why}; next: the same recipe without it")
        notices.print_notice(f"no CUDA graphs: {why}; steps run one operator at a time")

    def _decide(self, model: Any) -> Choice[bool]:
        """Whether a graph holds the whole step, once an eager one has made gradients and the optimizer is known."""
        whole = self._holds_update()
        if not whole.value:
            self._kept = [(p, torch.zeros_like(p)) for p in model.parameters() if p.grad is not None]
            return whole
        optimizer = self._trainer.optimizer
        groups = optimizer.param_groups
        self._rates = [torch.zeros((), device=self._trainer.args.device) for _ in groups]
        stepping = optimizer.step

        @functools.wraps(stepping)  # the schedule looks for a mark of its own on it
        def step(*arguments: Any, **settings: Any) -> Any:
            return None if self.stepped else stepping(*arguments, **settings)

        optimizer.step = step
        zeroing = model.zero_grad

        @functools.wraps(zeroing)
        def zero_grad(*arguments: Any, **settings: Any) -> None:
            if not self.stepped:  # a whole step's gradients never leave its graph
                zeroing(*arguments, **settings)

        model.zero_grad = zero_grad
        return whole

    def _share(self, model: Any) -> None:
        """Average the gradients of several processes from now on where a graph can hold that."""
        if model is self._trainer.model:
            return
        if why := obstacle(model):
            self._failed(why)
        else:
            self._reduction = Reduction(model)

    def _holds_update(self) -> Choice[bool]:
        trainer = self._trainer
        if trainer.args.gradient_accumulation_steps > 1:
            return Choice(False, "the update is of several batches and no part of a graph")
        if trainer.accelerator.scaler is not None:
            return Choice(False, "fp16's GradScaler updates outside of the graph")
        inner = trainer.optimizer.optimizer
        if type(inner) not in (torch.optim.Adam, torch.optim.AdamW) or not all(g["fused"] for g in inner.param_groups):
            return Choice(False, "only PyTorch's fused Adam and AdamW take their learning rate from the device")
        return Choice(True, "")

    def _key(self, model: Any, inputs: Any, items: Any) -> tuple[Any, dict[str, Tensor], Any]:
        """Return what a graph is recorded for, and the tensors and other values of the batch; None with a reason."""
        if not isinstance(inputs, Mapping):
            return None, {}, "the batch is not a mapping"
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in inputs.items() if name not in tensors}
        for name, value in others.items():
            if not isinstance(value, PLAIN):
                return None, {}, f"the batch's {name} is a {type(value).__name__}, neither tensor nor number"
        if isinstance(items, Tensor):
            tensors[ITEMS] = items
        else:
            others[ITEMS] = items
        shapes = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        scale = getattr(self._trainer, "current_gradient_accumulation_steps", 1)
        fixed = tuple(
            (group["weight_decay"], group["betas"], group["eps"])
            for group in (self._trainer.optimizer.param_groups if self._rates else ())
        )
        shared = getattr(model, "require_backward_grad_sync", True)
        return (shapes, tuple(others.items()), scale, fixed, shared), tensors, others

    def _by_graph(
        self, stock: Callable[..., Tensor], model: Any, key: Any, tensors: dict[str, Tensor], others: dict[str, Any]
    ) -> Tensor:
        if not model.training:
            model.train()  # as `stock` does, which is not called

        def batch(held: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
            whole = {**held, **others}
            items = whole.pop(ITEMS)
            return whole, items

        if not self._rates:
            self._lay_gradients()
            loss, *_ = self._graphs.run(key, tensors, lambda held: (self._passes(stock, model, *batch(held)),))
        else:
            for rate, group in zip(self._rates, self._trainer.optimizer.param_groups, strict=True):
                rate.fill_(group["lr"])
            loss, self.norm = self._graphs.run(key, tensors, lambda held: self._whole_step(stock, model, *batch(held)))
            self.stepped = True
        assert loss is not None
        return loss

    def _passes(self, stock: Callable[..., Tensor], model: Any, inputs: dict[str, Any], items: Any) -> Tensor:
        with as_they_are(inputs), _buffers_stay(model):
            return stock(model, inputs, items)

    def _whole_step(
        self, stock: Callable[..., Tensor], model: Any, inputs: dict[str, Any], items: Any
    ) -> tuple[Tensor, Tensor]:
        """Do what Trainer's loop does with one batch, in its order (transformers, trainer.py, _run_epoch)."""
        trainer = self._trainer
        loss = self._passes(stock, model, inputs, items)
        norm = trainer._clip_grad_norm(model) if trainer.args.max_grad_norm > 0 else None
        norm = trainer._get_grad_norm(model, grad_norm=norm)
        groups = trainer.optimizer.param_groups
        eager = [{"lr": group["lr"], "capturable": group["capturable"]} for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"], group["capturable"] = rate, True
            trainer.optimizer.step()
        finally:
            for group, values in zip(groups, eager, strict=True):
                group.update(values)
            model.zero_grad()
        return loss, norm

    def _lay_gradients(self) -> None:
        """Let the graph's backward add to gradients that stay where they are, zeros at an update's first batch."""
        if not self._kept or self._kept[0][0].grad is self._kept[0][1]:
            return
        parameters, places = zip(*self._kept, strict=True)
        if parameters[0].grad is None:
            torch._foreach_zero_(places)
        else:  # an eager batch came first
            torch._foreach_copy_(places, [parameter.grad for parameter in parameters])
        for parameter, place in self._kept:
            parameter.grad = place
