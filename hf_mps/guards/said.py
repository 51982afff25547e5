"""Which training arguments the user gave: a guard leaves those alone."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

_NOTE = "_hf_mps_given"

FILTER = "logging_nan_inf_filter"
"""Trainer's argument that hides losses which are no numbers: who gives it wants to go on in spite of them."""


def remember(training_arguments: Any) -> None:
    """Let the class, and every subclass of it, note the keywords that its objects are made with. Once.

    In `__new__`, because each subclass that is a dataclass has an `__init__` of its own.
    """
    if _NOTE in training_arguments.__dict__:
        return

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        named = [each.name for each in dataclasses.fields(cls) if each.init]
        made.__dict__[_NOTE] = (*named[: len(args)], *kwargs)
        return made

    training_arguments.__new__ = new
    setattr(training_arguments, _NOTE, ())


def said(arguments: Any, name: str) -> bool:
    """Whether the user gave the argument `name`: as a keyword, or as a flag on the command line."""
    given = getattr(arguments, _NOTE, ())
    # HfArgumentParser and dataclasses.replace give all of them; then the command line tells.
    if len(given) < sum(each.init for each in dataclasses.fields(arguments)):
        return name in given
    flags = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    return bool(flags & {name, f"no_{name}"})
