"""What a task hands to those who use a saved model: how rows without their labels are answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice

if TYPE_CHECKING:
    from hf_mps.finetune.data.load import Rows

# Rows that are read, tokenised and answered at a time: enough for batches of like work, few enough to be held.
AT_A_TIME = 1000


@dataclass(frozen=True)
class Picture:
    """An answer that is an image, in a file of its own beside the others where they go to a file: its PNG."""

    png: bytes


@dataclass
class Answering:
    """A saved model ready to answer; the fields of the same names are `Prepared`'s.

    `answers(trainer, rows)` yields the rows of predictions.csv without the truth, for rows that may lack the roles in
    the task's `TRUTH`; `trainer` is made of the other fields by `hf_mps.finetune.run.measuring`. It is called again and
    again with the next `at_a_time` rows, so what it learns of some must not depend on others.
    """

    model: Any
    processing_class: Any
    collator: Callable[[list[Any]], Any] | None
    answers: Callable[[Any, Rows], Iterable[Mapping[str, Any]]]
    every: Callable[[Any, Rows], Iterable[Mapping[str, Any]]] | None = None
    """The same with the probability of every class by its name (`probabilities`), where answers are classes."""
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    trainer: Callable[..., Any] | None = None
    arguments: type[Any] | None = None
    arguments_defaults: dict[str, Any] = field(default_factory=dict)
    trainer_settings: dict[str, Any] = field(default_factory=dict)
    at_a_time: int = AT_A_TIME
    batch: int | None = None
    """Rows that are computed at once, where it is not as many as in a run's evaluations."""
