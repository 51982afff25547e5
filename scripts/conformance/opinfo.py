"""PyTorch's own samples of operators and optimizers (OpInfo, OptimizerInfo), as the report and the suite take them."""

from __future__ import annotations

import random
from typing import Any, cast

import torch

from hf_mps.core.errors import UserError


def operators() -> list[Any]:
    """Every OpInfo of the installed torch, quick to ask for samples from here on.

    PyTorch's `sample_inputs` looks for the unittest that calls it, by the source of every frame up the stack
    (torch.testing._internal.common_utils.extract_test_fn). The frames of `python -m` have none, so that each is sought
    in every module that is loaded: 0.05 s a call, most of a run's time. Here no unittest calls, and none is sought.
    Its random numbers come from `seed`, which is torch.manual_seed without the devices that are not there.

    Raises UserError, with the next command, where PyTorch's own test tools are not whole.
    """
    try:
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    except ImportError as error:
        raise _incomplete(error) from error
    for module in (common_utils, core):
        module.__dict__.update(extract_test_fn=_no_test, set_rng_seed=_seed_all)
    return cast(list[Any], op_db)


def optimizers() -> list[Any]:
    """Every OptimizerInfo of the installed torch. Raises UserError as `operators` does."""
    try:
        from torch.testing._internal.common_optimizers import optim_db
    except ImportError as error:
        raise _incomplete(error) from error
    return cast(list[Any], optim_db)


def seed(number: int) -> None:
    """torch.manual_seed, for the CPU and the device alone.

    The others (cuda, xpu, mtia) note the whole stack of each call for the day they start: half of a check's time.
    """
    torch.default_generator.manual_seed(number)
    torch.mps.manual_seed(number)


def _seed_all(number: int) -> None:
    import numpy

    seed(number)
    random.seed(number)
    numpy.random.seed(number)


def _no_test() -> None:
    return None


def _incomplete(error: ImportError) -> UserError:
    return UserError(f"PyTorch's samples need {error.name}; next: pip install {error.name}")
