"""transformers' Trainer tells what fell back: `fallback_seconds` in its logs, a table at the end of a training.

What is known here is transformers' trainer.py: `log` gets the dictionary that goes to every callback and into the log
history, and `train` is one training. And of accelerate's launchers.py, that it sets a variable of the user's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

from hf_mps.metal.fallback.accounting import Report, ledger, monitor

REASON = "Trainer logs fallback_seconds and prints what fell back when a training ends; the user's variable stays"


VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"


patches = {
    "accelerate.launchers:notebook_launcher": "_notebook_launcher",
    "transformers.trainer:Trainer.log": "_log",
    "transformers.trainer:Trainer.train": "_train",
}


def _notebook_launcher(stock: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # It sets the variable to 1, too late for this process and over the user's own value for its children.
    users_value = os.environ.get(VARIABLE)
    if users_value is None:
        return stock(function, *args, **kwargs)

    @functools.wraps(function)
    def with_the_users(*its: Any, **more: Any) -> Any:
        os.environ[VARIABLE] = users_value
        return function(*its, **more)

    try:
        return stock(with_the_users, *args, **kwargs)
    finally:
        os.environ[VARIABLE] = users_value


def of_training(trainer: Any) -> Report | None:
    """Return what fell back in the trainer's last training, or None before its end."""
    return getattr(trainer, "_hf_mps_fallback", None)


def _train(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    before = ledger.snapshot()
    self._hf_mps_fallback_mark = (perf_counter(), ledger.seconds())
    try:
        return stock(self, *args, **kwargs)
    finally:
        self._hf_mps_fallback = ledger.report(before)
        ledger.print_report(before)


def _log(stock: Callable[..., None], self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    mark = getattr(self, "_hf_mps_fallback_mark", None)
    if mark is not None and "loss" in logs and ledger.seconds() > 0:
        now, total = perf_counter(), ledger.seconds()
        # Into the caller's dictionary, as Trainer.log itself puts the epoch there; only where an operator fell back.
        logs["fallback_seconds"] = round(total - mark[1], 4)
        monitor.check(total - mark[1], now - mark[0])
        self._hf_mps_fallback_mark = (now, total)
    stock(self, logs, *args, **kwargs)
