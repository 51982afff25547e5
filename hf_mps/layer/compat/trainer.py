"""Trainer as scripts of transformers 4 use it: its tokenizer, and methods overridden in their older form.

Replaced by processing_class (4.46, tokenizer removed in 5), and by num_items_in_batch and start_time, arguments that
Trainer passes since 4.46 and 4.47. Needless where Trainer has the argument, and for methods that take theirs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hf_mps.core.notices import print_notice
from hf_mps.core.patching import Give, Patch

# Method -> the argument that it got later.
_LATER = {"compute_loss": "num_items_in_batch", "training_step": "num_items_in_batch", "log": "start_time"}


class Tokenizer:
    """trainer.tokenizer; no data descriptor, so that a subclass's own attribute of that name is its own."""

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return None
        print_notice("trainer.tokenizer is gone from transformers 5; in its place: trainer.processing_class")
        return trainer.processing_class


def _init(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    if "tokenizer" in kwargs and "tokenizer" not in inspect.signature(stock).parameters:
        tokenizer = kwargs.pop("tokenizer")
        if kwargs.get("processing_class") is None:
            print_notice("Trainer(tokenizer=…): processing_class takes its place")
            kwargs["processing_class"] = tokenizer
        else:
            print_notice("Trainer(tokenizer=…): dropped, processing_class is given too")
    stock(self, *args, **kwargs)
    for name, later in _LATER.items():
        _accept(self, name, later)


def _accept(trainer: Any, name: str, later: str) -> None:
    """Let a method that was overridden before its last argument came be called with it."""
    method = getattr(trainer, name, None)
    # Seq2SeqTrainer's __init__ calls Trainer's, which has looked already; else it is the script's own.
    if method is None or name in vars(trainer):
        return
    parameters = inspect.signature(method).parameters
    if later in parameters or any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return
    count = len(parameters)

    @functools.wraps(method)
    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(later, None)
        return method(*args[:count], **kwargs)

    setattr(trainer, name, without)
    if name == "compute_loss":
        # Such a loss is a mean over its batch: Trainer has to divide it by the accumulation steps, as it did then.
        trainer.model_accepts_loss_kwargs = False
    print_notice(f"{type(trainer).__name__}.{name} is called without {later}, which transformers 5 passes")


_CLASSES = ("transformers.trainer:Trainer", "transformers.trainer_seq2seq:Seq2SeqTrainer")
patches = {
    **{f"{trainer}.__init__": Patch(_init, own=True) for trainer in _CLASSES},
    **{f"{trainer}.tokenizer": Give(Tokenizer()) for trainer in _CLASSES},
}
