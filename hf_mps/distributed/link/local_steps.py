"""Local steps: each rank trains by itself, and every so many steps accelerate's LocalSGD averages the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.local_sgd import LocalSGD
from transformers import TrainerCallback

from hf_mps.core.errors import UserError


class LocalSteps(TrainerCallback):  # type: ignore[misc]
    """Runs a Trainer's training inside LocalSGD, and averages before weights are measured or stored as well.

    `trainer` is the one it is added to: Trainer hands callbacks the model without DistributedDataParallel, whose
    `no_sync` LocalSGD needs. Raises UserError at the start of a training that LocalSGD does not support.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        self._trainer, self._every = trainer, steps
        self._local: LocalSGD | None = None
        self._model: _Trained
        self._averaged = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accelerator, self._model = self._trainer.accelerator, _Trained(self._trainer.model_wrapped)
        try:
            local = LocalSGD(accelerator=accelerator, model=self._model, local_sgd_steps=self._every)
        except NotImplementedError as error:
            kind = accelerator.distributed_type.value
            raise UserError(
                f"link.local_steps={self._every}: accelerate's LocalSGD does not average under {kind}; next: "
                "link.local_steps=1"
            ) from error
        local.num_steps = state.global_step  # a resumed run averages at the steps at which it would have
        self._local = local
        local.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._local is not None
        with self._model.in_place():
            self._local.step()
        self._averaged = state.global_step % self._every == 0
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self._average()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._average()  # Trainer evaluates and saves once all callbacks have been here

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._local is not None:
            with self._model.in_place():
                self._local.__exit__(None, None, None)
            self._local, self._averaged = None, True

    def _average(self) -> None:
        """Average now, unless nothing was trained since the weights were last alike."""
        if self._averaged or self._local is None:
            return
        with self._model.in_place():
            self._local.__exit__(None, None, None)
        self._local.__enter__()
        self._averaged = True


class _Trained:
    """The part of a DistributedDataParallel model that LocalSGD is to average: weights that are trained."""

    def __init__(self, model: Any) -> None:
        self.no_sync = model.no_sync
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._weights

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Keep each weight where it lies: LocalSGD gives it new memory, and captured graphs know its address."""
        places = [weight.data for weight in self._weights]
        yield
        for weight, place in zip(self._weights, places, strict=True):
            if weight.data.data_ptr() != place.data_ptr():
                place.copy_(weight.data)
                weight.data = place
