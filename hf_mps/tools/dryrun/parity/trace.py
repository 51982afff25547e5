"""A target's steps on one device, module by module, in order: what goes in, forward, backward, update.

Each run has the same weights, rows and seed, and no dropout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import set_seed

from hf_mps.core.choice import Choice
from hf_mps.core.text import summary
from hf_mps.finetune.tasks import Prepared
from hf_mps.tools.dryrun.step import TrainingStep, models_of

INPUT, FORWARD, BACKWARD, GRADIENT, UPDATE = "input", "forward", "backward", "gradient", "update"
# (step, what, module, which): `which` is an argument's or parameter's name, or the number of the call.
Key = tuple[int, str, str, str]


SAMPLES = 4096


@dataclass(frozen=True)
class Digest:
    """`norm` over all values, `values` at most SAMPLES of them, evenly spread, as float64 on the CPU."""

    norm: float
    values: Any

    def rel_error(self, other: Digest, floor: float = 0.0) -> float:
        """Return the relative error of `other`: the larger of norm's and values', by this one's size, at least `floor`.

        Infinite where the shapes differ, or one holds a NaN or an infinity and the other does not.
        """
        if self.values.shape != other.values.shape:
            return float("inf")
        both = self.values.isfinite() & other.values.isfinite()
        if not bool((self.values.isfinite() == other.values.isfinite()).all()):
            return float("inf")
        ours, theirs = self.values[both], other.values[both]
        spread = float((ours - theirs).norm() / max(float(ours.norm()), floor, 1e-30))
        whole = abs(self.norm - other.norm) / max(self.norm, floor, 1e-30)
        return max(spread, whole) if whole == whole else spread


def digest(tensor: Any) -> Digest:
    """Return the digest of a tensor on any device; waits for the device."""
    flat = tensor.detach().reshape(-1)
    count = flat.numel()
    some = flat if count <= SAMPLES else flat[torch.arange(SAMPLES, device=flat.device) * (count - 1) // (SAMPLES - 1)]
    norm = float(torch.linalg.vector_norm(flat.float())) if count else 0.0
    return Digest(norm, some.to("cpu").double())


@dataclass
class Trace:
    """A run over some steps: `events` in the order in which they came, losses and gradient norms by step.

    `failure` is what ended it early, in one line.
    """

    device: str
    events: dict[Key, Digest] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    failure: str = ""


class Recorder:
    """Fills a Trace while `model` trains; enter it around the steps, and tell it of each backward pass and step."""

    def __init__(self, model: torch.nn.Module, trace: Trace) -> None:
        self._model, self._trace = model, trace
        self._names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._owners = {name: name.rpartition(".") for name, parameter in model.named_parameters()}
        self._step, self._calls, self._batch = 1, dict[str, int](), list[float]()
        self._before: dict[str, Digest] = {}

    def watching(self) -> ExitStack:
        """Return a context manager with hooks on every module and on every parameter that trains."""
        hooks = ExitStack()
        for module in self._names:
            hooks.enter_context(module.register_forward_pre_hook(self._entered, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(self._left))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._gradient(name)))  # type: ignore[no-untyped-call]
        self._before = self._weights()
        return hooks

    def backward_done(self, loss: torch.Tensor) -> None:
        """A batch has gone forward and backward."""
        self._batch.append(float(loss.detach()))

    def about_to_step(self) -> None:
        """All batches of an optimizer step are done: its loss, and the norm of its gradients as they stand."""
        self._trace.losses.append(sum(self._batch))
        gradients = (p.grad for p in self._model.parameters() if p.grad is not None)
        self._trace.norms.append(math.hypot(*(float(each.float().norm()) for each in gradients)))

    def step_done(self, number: int) -> None:
        """An optimizer step is done: what it changed."""
        after = self._weights()
        for name, now in after.items():
            module, _, which = self._owners[name]
            before = self._before[name]
            # Without a norm: that of the change is not known, since of the weights before there are samples alone.
            self._note(UPDATE, module, which, Digest(math.nan, now.values - before.values))
        self._before, self._step, self._calls, self._batch = after, number + 1, {}, []

    def _weights(self) -> dict[str, Digest]:
        return {name: digest(p) for name, p in self._model.named_parameters() if p.requires_grad}

    def _note(self, what: str, module: str, which: str, found: Digest) -> None:
        self._trace.events[(self._step, what, module or type(self._model).__name__, which)] = found

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        number = self._calls[name] = self._calls.get(name, 0) + 1
        if module is self._model:
            for which, value in kwargs.items():
                if isinstance(value, torch.Tensor) and value.numel():
                    self._note(INPUT, "the batch", f"{which}, call {number}", digest(value))
        for place, value in enumerate([*args, *kwargs.values()]):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point():
                which = f"call {number}" + (f", argument {place + 1}" if place else "")
                hook = functools.partial(self._flowed, self._step, name, which)
                value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _flowed(self, step: int, name: str, which: str, grad: torch.Tensor) -> None:
        if step == self._step:
            self._note(BACKWARD, name, which, digest(grad))

    def _left(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name = self._names[module]
        for place, value in enumerate(_tensors(output)):
            which = f"call {self._calls.get(name, 1)}" + (f", result {place + 1}" if place else "")
            self._note(FORWARD, name, which, digest(value))

    def _gradient(self, name: str) -> Any:
        module, _, which = self._owners[name]

        def noted(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._note(GRADIENT, module, which, digest(parameter.grad))

        return noted


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors at the top of a module's output."""
    if isinstance(output, torch.Tensor):
        output = [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else []
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


NO_DROPOUT = Choice("0", "devices draw different random numbers, so every dropout is off")
IN_FLOAT32 = {"bf16": False, "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False}


class Weights:
    """The weights and buffers of a prepared task as they are now, kept on the CPU, to begin again from."""

    def __init__(self, prepared: Prepared) -> None:
        models = models_of(prepared)
        tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
        self._kept = [(tensor, tensor.detach().cpu().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put them back, in place, on whatever device they are; gradients are dropped."""
        with torch.no_grad():
            for tensor, value in self._kept:
                tensor.copy_(value)
                tensor.grad = None


def trace_steps(make: Callable[[], TrainingStep], device: str, steps: int, seed: int) -> Trace:
    """Take `steps` steps of what `make` gives, on `device`, and return their trace.

    `make` is called with the random numbers of `seed`. A failure on the way ends the trace and stands in it.
    """
    set_seed(seed)
    step = make()
    without_dropout(step.model)
    if hasattr(step.trainer, "own_answers"):
        step.trainer.own_answers = 0.0  # the model draws them too
    result = Trace(device)
    recorder = Recorder(step.model, result)
    accelerator = step.trainer.accelerator
    if accelerator.scaler is not None:
        # With its first scales float16 overflows, and the optimizer skips steps that the reference takes.
        accelerator.scaler = torch.amp.GradScaler(device, init_scale=1.0)

    def backward_done(loss: Any) -> None:
        recorder.backward_done(loss)
        if accelerator.sync_gradients:
            recorder.about_to_step()

    # Making the step drew random numbers: the steps themselves begin from the seed again.
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
