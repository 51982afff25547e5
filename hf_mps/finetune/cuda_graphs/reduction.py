"""Gradients of several processes are averaged inside a step's backward pass, by collectives that a graph can hold.

DDP's reducer keeps its books on the host while a pass runs, and can be recorded only where the model was wrapped on the
recording's own stream and has taken eleven steps there (docs.pytorch.org/docs/stable/notes/cuda.html, "Usage with
DistributedDataParallel"); Trainer wraps it elsewhere. So the model inside the wrapper runs, without a reducer, and each
bucket of gradients is sent as soon as the last of them is whole, beside the rest of the backward pass. Eager steps of
such a training go the same way: whichever rank records and whichever replays, all send the same buckets in the same
order.

The reducer has to go, though nobody asks it any more: it keeps the node of autograd by which each parameter gets its
gradient, and with it the stream on which that was made, the default one. A recording that sends work there is void
(torch/csrc/autograd/input_buffer.cpp warns of it, naming DDP). Its buckets, as large as the gradients, are free then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.core.errors import RunError

BUCKET = 25 * 2**20
"""Bytes of gradients that are sent at once, DDP's own default: enough for a link's full rate, few enough to overlap."""


def obstacle(wrapped: Any) -> str:
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
        self._buckets = buckets(_trained(wrapped)[::-1])
        self._place = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket}
        self._left: list[int] = []
        self._sent: list[Any] = []
        self._late = False
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._whole)
            for each in wrapped.module.parameters()
            if each.requires_grad
        ]
        # What DDP's forward pass asks them for, it asks in passes with gradients alone.
        wrapped.reducer = wrapped.logger = None

    def around(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
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
            raise RunError(
                "a parameter takes part that did not in the first step, and its gradient would stay this rank's own;"
                " next: cuda_graphs=false"
            )

    def _send(self, bucket: Sequence[Tensor]) -> None:
        gradients = [parameter.grad for parameter in bucket]
        options = torch.distributed.AllreduceCoalescedOptions()
        options.reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.AVG)
        self._sent.append(self._wrapped.process_group.allreduce_coalesced(gradients, options))


def _trained(wrapped: Any) -> list[Tensor]:
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
