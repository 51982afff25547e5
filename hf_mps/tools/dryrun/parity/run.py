"""A target's steps on one device, watched: the same weights, rows and seed each time, and no dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.text import summary
from hf_mps.tools.dryrun.parity.trace import Recorder, Trace

if TYPE_CHECKING:
    from hf_mps.finetune.tasks._base import Prepared
    from hf_mps.tools.dryrun.step import TrainingStep

NO_DROPOUT = Choice("0", "devices draw different random numbers, so every dropout is off")
IN_FLOAT32 = {"bf16": False, "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False}


class Weights:
    """The weights and buffers of a prepared task as they are now, kept on the CPU, to begin again from."""

    def __init__(self, prepared: Prepared) -> None:
        self._model = prepared.model
        self._adapters = set(getattr(prepared.model, "peft_config", ()))
        self._kept = [(tensor, tensor.detach().cpu().clone()) for tensor in self._tensors(prepared)]

    def restore(self) -> None:
        """Put them back, in place, on whatever device they are; gradients are dropped."""
        import torch

        for added in set(getattr(self._model, "peft_config", ())) - self._adapters:
            self._model.delete_adapter(added)  # a trainer's own (DPO's reference), which it makes anew
        with torch.no_grad():
            for tensor, value in self._kept:
                tensor.copy_(value)
                tensor.grad = None

    @staticmethod
    def _tensors(prepared: Prepared) -> list[Any]:
        from hf_mps.tools.dryrun.step import models_of

        return [each for model in models_of(prepared) for each in (*model.parameters(), *model.buffers())]


def trace(make: Callable[[], TrainingStep], device: str, steps: int, seed: int) -> Trace:
    """Take `steps` steps of what `make` gives, on `device`, and return their trace.

    `make` is called with the random numbers of `seed`. A failure on the way ends the trace and stands in it.
    """
    from transformers import set_seed

    set_seed(seed)
    step = make()
    without_dropout(step.model)
    result = Trace(device)
    recorder = Recorder(step.model, result)
    accelerator = step.trainer.accelerator
    if accelerator.scaler is not None:
        import torch

        # With its first scales float16 overflows, and the optimizer skips steps that the reference takes.
        accelerator.scaler = torch.amp.GradScaler(device, init_scale=1.0)

    def backward_done(loss: Any) -> None:
        recorder.backward_done(loss)
        if accelerator.sync_gradients:
            recorder.about_to_step()

    set_seed(seed)
    with recorder.watching():
        try:
            step.run(steps, after_backward=backward_done, after_step=recorder.step_done)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            result.failure = summary(error)
    return result


def without_dropout(model: Any) -> None:
    """Set every rate of dropping something to 0: in `model`'s modules, and in the configurations that they read."""
    seen: set[int] = set()
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            if owner is None or id(owner) in seen or not hasattr(owner, "__dict__"):
                continue
            seen.add(id(owner))
            for name, value in list(vars(owner).items()):
                rate = "drop" in name or (name == "p" and "Dropout" in type(owner).__name__)
                if rate and isinstance(value, float) and 0 < value <= 1:
                    setattr(owner, name, 0.0)
