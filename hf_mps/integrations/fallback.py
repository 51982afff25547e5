"""transformers' Trainer tells what fell back: `fallback_seconds` in its logs, a table at the end of a training.

What is known here is trainer.py: `log` gets the dictionary that goes to every callback and into the log history, and
`train` is one training.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import ModuleType
from typing import Any

from hf_mps.fallback.ledger import Report, ledger, share
from hf_mps.integrations.patch import around

REASON = "Trainer logs fallback_seconds and prints what fell back when a training ends"


def apply(trainer: ModuleType) -> None:
    """Switch transformers.trainer on. Raises AttributeError where Trainer has no such method."""
    around(trainer.Trainer, "log", _log)
    around(trainer.Trainer, "train", _train)


def of_training(trainer: Any) -> Report | None:
    """What fell back in the trainer's last training, or None before its end."""
    return getattr(trainer, "_hf_mps_fallback", None)


def _train(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    before = ledger.now()
    self._hf_mps_fallback_mark = (perf_counter(), ledger.total())
    try:
        return stock(self, *args, **kwargs)
    finally:
        self._hf_mps_fallback = ledger.report(before)
        ledger.print_report(before)


def _log(stock: Callable[..., None], self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    mark = getattr(self, "_hf_mps_fallback_mark", None)
    if mark is not None and "loss" in logs and ledger.total() > 0:
        now, total = perf_counter(), ledger.total()
        logs["fallback_seconds"] = round(total - mark[1], 4)
        share.check(total - mark[1], now - mark[0])
        self._hf_mps_fallback_mark = (now, total)
    stock(self, logs, *args, **kwargs)
