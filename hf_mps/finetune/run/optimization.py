"""The optimizer and schedule of a run, tried on one weight before training: what they refuse, or ignore."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line

# Of PyTorch's own optimizers, and transformers' Adafactor, everything that is set is passed on and nothing else.
PLAIN = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
LOW_RANK = ("galore_", "apollo_")
# transformers' get_scheduler drops these without a word.
WITHOUT_KWARGS = ("constant", "constant_with_warmup")
WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")


def refuse_unusable(args: Any, model: Any, steps: int, training: Mapping[str, Any]) -> None:
    """Raise UserError for an optimizer or schedule that cannot be made, or that ignores what `training` sets.

    `args` are the training arguments of a run of `steps` steps, `training` is the recipe's own section. `model`, in
    which low-rank optimizers look for their layers, is not changed.
    """
    name, schedule = _word(args.optim), _word(args.lr_scheduler_type)
    given = args.optim_args
    called = f"training.optim={name}" + (f" training.optim_args={given}" if given else "")
    if given and any(part.count("=") != 1 for part in given.split(",")):
        raise UserError(f"training.optim_args is '{given}'; allowed: KEY=VALUE,KEY=VALUE")
    try:
        optimizer = _optimizer(args, model)
    except Exception as error:  # whatever the optimizer's own package raises for what it is given
        raise _refused(called, error) from error
    _refuse_ignored(args, model, name, schedule, training)
    options = args.lr_scheduler_kwargs
    called = f"training.lr_scheduler_type={schedule}" + (f" with lr_scheduler_kwargs {options}" if options else "")
    try:
        wrong = _wrong_rate(_schedule(args, optimizer, steps), steps)
    except Exception as error:  # TypeError, ValueError, ZeroDivisionError, …: by schedule
        raise _refused(called, error) from error
    if wrong:
        raise UserError(f"{called}: {wrong}; allowed: a learning rate that is 0 or more in every step")


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


def _schedule(args: Any, optimizer: Any, steps: int) -> Any:
    from transformers import get_scheduler

    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def _wrong_rate(schedule: Any, steps: int) -> str:
    """Return what is wrong with the learning rate somewhere in the run, as a clause; empty where nothing is."""
    for factor in getattr(schedule, "lr_lambdas", ()):
        for step in sorted({0, 1, steps // 10, steps // 2, 9 * steps // 10, steps - 1}):
            value = factor(step)
            if not math.isfinite(value) or value < 0:
                return f"it multiplies the learning rate by {value:g} in step {step}"
    return ""


def _refuse_ignored(args: Any, model: Any, name: str, schedule: str, training: Mapping[str, Any]) -> None:
    """Raise UserError for an option that the optimizer or the schedule never reads."""
    with_it = f"with training.optim={name}"
    adam = [key for key in ("adam_beta1", "adam_beta2", "adam_epsilon") if training.get(key) is not None]
    if adam and name in ("sgd", "adagrad", "rmsprop", "adafactor"):
        raise UserError(f"training.{adam[0]} does nothing {with_it}; leave it out")
    if training.get("optim_target_modules") is not None and not name.startswith(LOW_RANK):
        raise UserError(f"training.optim_target_modules does nothing {with_it}; it is for GaLore and Apollo")
    for part in (args.optim_args or "").split(",") if name in PLAIN else ():
        if part and _settings(args, model, without=part) == _settings(args, model):
            raise UserError(f"training.optim_args has {part.partition('=')[0]}, which does nothing {with_it}")
    if args.lr_scheduler_kwargs and schedule in WITHOUT_KWARGS:
        raise UserError(f"training.lr_scheduler_kwargs does nothing with training.lr_scheduler_type={schedule}")
    if training.get("warmup_steps") and schedule in WITHOUT_WARMUP:
        none = "training.warmup_steps=0 is none"
        instead = f"constant_with_warmup has one, and {none}" if schedule == "constant" else none
        raise UserError(f"training.warmup_steps does nothing with training.lr_scheduler_type={schedule}; {instead}")


def _settings(args: Any, model: Any, without: str = "") -> Any:
    """Return the optimizer's class and keywords, without one of the optim_args."""
    from transformers import Trainer

    fewer = copy.copy(args)
    fewer.optim_args = ",".join(part for part in args.optim_args.split(",") if part != without)
    return Trainer.get_optimizer_cls_and_kwargs(fewer, model)


def _word(value: Any) -> str:
    """Return an option's text, of an Enum or of a string."""
    return str(getattr(value, "value", value))


def _refused(called: str, error: Exception) -> UserError:
    return UserError(f"{called}: refused: {first_line(error)}")
