"""A reward function as the trainer calls it: with the arguments that it takes, its answer checked each time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from hf_mps.core.errors import RunError
from hf_mps.core.text import counted, summary

GIVEN = ("prompts", "completions", "completion_ids")
"""What every function is given, beside the columns of the rows: lists with an entry for each completion."""
ALLOWED = "a list with a number, or None, for each completion"


class ScoreError(RunError):
    """A reward function failed, or returned no score for each completion."""


class Score:
    """The reward `name`: calls the function that `find` returns with what it takes, and returns a score a completion.

    `find` is called when the function is first needed: it may import code. `options` are further arguments. The row's
    reference answer is handed over as `answer_as`. The scores are finite floats, or None where the function says that
    it does not apply. Raises ScoreError for any other answer, and where the function fails.
    """

    def __init__(
        self, name: str, find: Callable[[], Callable[..., Any]], options: Mapping[str, Any], answer_as: str = "answer"
    ) -> None:
        self.__name__ = name  # TRL's name in its logs
        self._find, self._options, self._answer_as = find, options, answer_as

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return self._find()

    @cached_property
    def _parameters(self) -> list[inspect.Parameter] | None:
        """The parameters of the function, None where it does not tell them."""
        try:
            return list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):
            return None

    def required(self) -> Iterator[str]:
        """Yield the names of the arguments that the function cannot do without."""
        for parameter in self._parameters or ():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.default is parameter.empty and parameter.name not in self._options:
                yield parameter.name

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        given = {"completions": completions, **columns, **self._options}
        if "answer" in columns:
            given[self._answer_as] = columns["answer"]
        try:
            known = self._parameters
            # A function that has `**` or hides its parameters takes everything.
            if known is not None and not any(one.kind is one.VAR_KEYWORD for one in known):
                given = {one.name: given[one.name] for one in known if one.name in given}
            found = self._function(**given)
        except Exception as error:
            raise ScoreError(f"the reward {self.__name__} failed: {summary(error)}") from error
        return [self._number(score) for score in self._scores(found, len(completions))]

    def _scores(self, found: Any, count: int) -> list[Any]:
        if isinstance(found, (str, bytes, Mapping)) or not hasattr(found, "__iter__") or not hasattr(found, "__len__"):
            raise ScoreError(f"the reward {self.__name__} returned a {type(found).__name__}; allowed: {ALLOWED}")
        try:
            scores = list(found)
        except TypeError as error:  # a tensor without dimensions has a length, and none
            raise ScoreError(f"the reward {self.__name__} returned one number; allowed: {ALLOWED}") from error
        if len(scores) != count:
            came = f"{counted(len(scores), 'score')} for {counted(count, 'completion')}"
            raise ScoreError(f"the reward {self.__name__} returned {came}; allowed: {ALLOWED}")
        return scores

    def _number(self, score: Any) -> float | None:
        if score is None:
            return None
        try:
            value = float(score)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(score).__name__
            raise ScoreError(f"the reward {self.__name__} returned a {kind} as a score; allowed: {ALLOWED}") from error
        if not math.isfinite(value):
            raise ScoreError(f"the reward {self.__name__} returned {value}; allowed: a finite number, or None")
        return value
