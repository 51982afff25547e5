"""The optimizer and schedule of a run, made for one weight before training: what they refuse becomes one line."""

from __future__ import annotations

import copy
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line

# Of PyTorch's own optimizers, and transformers' Adafactor, everything that is set is passed on and nothing else.
PLAIN = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")


def refuse_unusable(args: Any, model: Any, steps: int) -> None:
    """Raise UserError for an optimizer or schedule that cannot be made.

    `args` are the training arguments of a run of `steps` steps. `model`, in which low-rank optimizers look for their
    layers, is not changed.
    """
    name, schedule, given = _word(args.optim), _word(args.lr_scheduler_type), args.optim_args
    if given and any(part.count("=") != 1 for part in given.split(",")):
        raise UserError(f"training.optim_args is '{given}'; allowed: KEY=VALUE,KEY=VALUE")
    tried = f"training.optim={name}" + (f" training.optim_args={given}" if given else "")
    options = args.lr_scheduler_kwargs
    try:
        optimizer = _optimizer(args, model)
        tried = f"training.lr_scheduler_type={schedule}" + (f" with lr_scheduler_kwargs {options}" if options else "")
        _schedule(args, optimizer, steps)
    except Exception as error:  # whatever the optimizer's own package or the schedule raises for what it is given
        raise UserError(f"{tried}: refused: {first_line(error)}") from error


def _optimizer(args: Any, model: Any) -> Any:
    """Return the optimizer over one weight of its own."""
    import torch
    from transformers import Trainer

    alone = copy.copy(args)
    # A layer-wise one hangs hooks into the model; it takes the settings of the one that steps for all layers at once.
    alone.optim = type(args.optim)(_word(args.optim).removesuffix("_layerwise"))
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(alone, model)
    weight = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    if (
        not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))
        or {"model", "params"} & settings.keys()
    ):
        return torch.optim.SGD([weight], lr=args.learning_rate)  # made of the model itself: it has been looked at
    return kind([weight], **settings)


def _schedule(args: Any, optimizer: Any, steps: int) -> None:
    """Make the schedule, and ask it for the rate of a later step: some read their options there."""
    from transformers import get_scheduler

    made = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    for factor in getattr(made, "lr_lambdas", ()):
        factor(steps // 2)


def _word(value: Any) -> str:
    """Return an option's text, of an Enum or of a string."""
    return str(getattr(value, "value", value))
