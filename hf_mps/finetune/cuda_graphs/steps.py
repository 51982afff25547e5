"""Trainer's steps as CUDA graphs: Trainer's own loop and its own `training_step`, recorded once for each shape."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.finetune.cuda_graphs.graphs import MOST, Graphs, RecordingFailed, Unmasked, as_they_are
from hf_mps.finetune.run.trainer import StepMethod

# Gradients of several processes are averaged inside a step's backward pass, by collectives that a graph can hold.
#
# DDP's reducer keeps its books on the host while a pass runs, and can be recorded only where the model was wrapped on
# the recording's own stream and has taken eleven steps there (docs.pytorch.org/docs/stable/notes/cuda.html, "Usage with
# DistributedDataParallel"); Trainer wraps it elsewhere. So the model inside the wrapper runs, without a reducer, and
# each bucket of gradients is sent as soon as the last of them is whole, beside the rest of the backward pass. Eager
# steps of such a training go the same way: whichever rank records and whichever replays, all send the same buckets in
# the same order.
#
# The reducer has to go, though nobody asks it any more: it keeps the node of autograd by which each parameter gets its
# gradient, and with it the stream on which that was made, the default one. A recording that sends work there is void
# (torch/csrc/autograd/input_buffer.cpp warns of it, naming DDP). Its buckets, as large as the gradients, are free then.

BUCKET = 25 * 2**20
"""Bytes of gradients that are sent at once, DDP's own default: enough for a link's full rate, few enough to overlap."""


Step = Callable[..., Tensor]
"""Trainer's `training_step`, or what takes its place."""


def reduction_obstacle(wrapped: Any) -> str:
    """Return why the gradients of a wrapped model cannot be averaged here, as a clause; empty where they can."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(wrapped, DistributedDataParallel):
        return f"{type(wrapped).__name__} reduces the gradients by itself"
    if wrapped._comm_hooks:
        return "a communication hook changes the gradients on their way"
    device = next(wrapped.module.parameters()).device
    backend = wrapped.process_group._get_backend(device).name()
    if device.type == "cuda" and backend != "nccl":
        return f"the backend {backend} takes the gradients through the host"
    return ""


class Reduction:
    """The gradients of a model that DDP has wrapped and that has taken one step; the same on every rank.

    What got a gradient in that step is averaged from then on: with zeros from a rank where it gets none.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        # From the last layer to the first, as their gradients come.
        self._buckets = buckets(trained_parameters(wrapped)[::-1])
        self._place = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket}
        self._left: list[int] = []
        self._sent: list[Any] = []
        self._late = False
        trained = [each for each in wrapped.module.parameters() if each.requires_grad]
        self._hooks = [each.register_post_accumulate_grad_hook(self._whole) for each in trained]
        # What DDP's forward pass asks them for, it asks in passes with gradients alone.
        wrapped.reducer = wrapped.logger = None

    def around(self, step: Step) -> Step:
        """Return `step(model, …)` for the model inside the wrapper; afterwards the gradients are the ranks' mean.

        Where the wrapped model would not synchronise (`no_sync`) they stay the rank's own. Raises RunError for a
        parameter that takes part only now.
        """

        def stepped(wrapped: Any, *arguments: Any, **settings: Any) -> Tensor:
            if not wrapped.require_backward_grad_sync:
                return step(wrapped.module, *arguments, **settings)
            self._left = [len(bucket) for bucket in self._buckets]
            self._sent = []
            try:
                loss = step(wrapped.module, *arguments, **settings)
                self._send_all()
            finally:
                self._left = []
            for work in self._sent:
                work.wait()
            return loss

        return stepped

    def share_buffers(self) -> None:
        """Give every rank the main one's buffers before a forward pass, where DDP would."""
        if self._wrapped.will_sync_module_buffers():
            self._wrapped._sync_buffers()

    def close(self) -> None:
        """Leave the gradients to DDP again, with a reducer as a wrapper that was copied gets it (`__setstate__`)."""
        for hook in self._hooks:
            hook.remove()
        wrapped = self._wrapped
        parameters, sparse = wrapped._build_params_for_reducer()
        names = wrapped._build_debug_param_to_name_mapping(parameters)
        wrapped._ddp_init_helper(parameters, sparse, names, wrapped.static_graph)

    def _whole(self, parameter: Tensor) -> None:
        """A parameter's gradient of this pass is whole."""
        if not self._left:
            return
        number = self._place.get(id(parameter))
        if number is None:
            self._late = True
            return
        self._left[number] -= 1
        while len(self._sent) < len(self._buckets) and self._left[len(self._sent)] == 0:
            self._send(self._buckets[len(self._sent)])

    def _send_all(self) -> None:
        """Send what the backward pass did not reach; the other ranks wait for it."""
        for bucket in self._buckets[len(self._sent) :]:
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._send(bucket)
        if self._late:
            told = "a parameter takes part that did not in the first step, and its gradient would stay this rank's own"
            raise RunError(f"{told}; next: cuda_graphs=false")

    def _send(self, bucket: Sequence[Tensor]) -> None:
        gradients = [parameter.grad for parameter in bucket]
        options = torch.distributed.AllreduceCoalescedOptions()
        options.reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.AVG)
        self._sent.append(self._wrapped.process_group.allreduce_coalesced(gradients, options))


def trained_parameters(wrapped: Any) -> list[Tensor]:
    """Return the parameters that have a gradient on any rank."""
    every = [each for each in wrapped.module.parameters() if each.requires_grad]
    has = torch.tensor([each.grad is not None for each in every], dtype=torch.int32, device=every[0].device)
    torch.distributed.all_reduce(has, torch.distributed.ReduceOp.MAX, group=wrapped.process_group)
    return [each for each, one in zip(every, has.tolist(), strict=True) if one]


def buckets(parameters: Sequence[Tensor], size: int = BUCKET) -> list[list[Tensor]]:
    """Return neighbours of one dtype together, each bucket of `size` bytes or of one parameter more."""
    found: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if room <= 0 or found[-1][0].dtype != parameter.dtype:
            found.append([])
            room = size
        found[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return found


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
    """Raise RecordingFailed where a model puts another tensor in a buffer's place, and give it the first one back."""
    before = [(module, name, tensor) for module in model.modules() for name, tensor in module._buffers.items()]
    yield
    # A tensor made while a step is recorded is in the graphs' memory and holds nothing yet; a model that keeps it for
    # later steps (a table of positions that has grown) would read what another graph leaves there.
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

    def training_step(self, stock: Step, model: Any, inputs: Any, items: Any) -> Tensor:
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

    def _eagerly(self, reason: str, stock: Step, model: Any, inputs: Any, items: Any) -> Tensor:
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
        self._rates = [torch.zeros((), device=self._trainer.args.device) for _ in optimizer.param_groups]
        stepping = optimizer.step

        @functools.wraps(stepping)  # the schedule has marked the wrapped method and looks for the mark
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
        if why := reduction_obstacle(model):
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
        groups = self._trainer.optimizer.param_groups if self._rates else ()
        fixed = tuple((group["weight_decay"], group["betas"], group["eps"]) for group in groups)
        shared = getattr(model, "require_backward_grad_sync", True)
        return (shapes, tuple(others.items()), scale, fixed, shared), tensors, others

    def _by_graph(self, stock: Step, model: Any, key: Any, tensors: dict[str, Tensor], rest: dict[str, Any]) -> Tensor:
        if not model.training:
            model.train()  # as `stock` does, which is not called

        def batch(held: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
            whole = {**held, **rest}
            return whole, whole.pop(ITEMS)

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

    def _passes(self, stock: Step, model: Any, inputs: dict[str, Any], items: Any) -> Tensor:
        with as_they_are(inputs), _buffers_stay(model):
            return stock(model, inputs, items)

    def _whole_step(self, stock: Step, model: Any, inputs: dict[str, Any], items: Any) -> tuple[Tensor, Tensor]:
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
