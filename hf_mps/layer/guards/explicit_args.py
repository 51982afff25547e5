"""Which training arguments the user gave: a guard leaves those alone."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from typing import Any

# By identity, because TrainingArguments cannot be hashed; and not in the object, which is the user's: vars() and
# training_args.bin have what stock has. A copy or a pickle of one loses its note, as if nothing had been given.
_given: dict[int, tuple[str, ...]] = {}

FILTER = "logging_nan_inf_filter"
"""Trainer's argument that hides losses which are no numbers: who gives it wants to go on in spite of them."""


TARGET = "transformers.training_args:TrainingArguments.__new__"


def track(stock: Any) -> Any:
    """Note, for TrainingArguments and every subclass of it, the keywords that each object is made with. Once.

    In `__new__`, because each subclass that is a dataclass has its own `__init__`. Patch it into TARGET.
    """
    if getattr(stock, "hf_mps_notes", False):
        return stock

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        named = [each.name for each in dataclasses.fields(cls) if each.init]
        _given[id(made)] = (*named[: len(args)], *kwargs)
        # Not when the process ends, where nobody reads the notes any more.
        weakref.finalize(made, _given.pop, id(made), None).atexit = False
        return made

    new.hf_mps_notes = True  # type: ignore[attr-defined]
    return new


def was_given(arguments: Any, name: str) -> bool:
    """Return whether the user gave the argument `name`: as a keyword, or as a flag on the command line."""
    given = _given.get(id(arguments), ())
    # HfArgumentParser and dataclasses.replace give all of them; then the command line tells.
    if len(given) < sum(each.init for each in dataclasses.fields(arguments)):
        return name in given
    flags = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    return bool(flags & {name, f"no_{name}"})
