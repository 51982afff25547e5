"""The rewards of a recipe: its own words for them, the functions behind the names, and what is refused of either."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from unicodedata import category

from pydantic import Field, model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import summary
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.rewards.builtin import BUILT_IN, OPTIONS, WITH_ANSWER
from hf_mps.finetune.rewards.score import GIVEN, Score, ScoreError

ALLOWED = f"{', '.join(BUILT_IN)}, or the dotted name of an installed function, such as trl.rewards.think_format_reward"
ENTRY_POINTS = "hf_mps.rewards"
"""The group of entry points under which an installed package declares reward functions."""
TRL = "trl.rewards"
AGREEMENT = "trust_reward_code"
"""The recipe's key that allows any other importable function; only a command line may give it."""


class Reward(schema.Section):
    """A reward by `name`: a built-in one, one of TRL's (`trl.rewards.NAME`), one that an installed package declares
    (entry points of the group `hf_mps.rewards`), or with `trust_reward_code=true` any importable function.

    `weight` is its share of the sum. `most` belongs to `length` (in tokens), `pattern` to `format`. `answer_as` is the
    keyword under which a function takes the row's reference answer (`trl.rewards.accuracy_reward`: solution).
    """

    name: str
    weight: float = 1.0
    most: int | None = Field(default=None, ge=1)
    pattern: str | None = None
    answer_as: str = "answer"

    @model_validator(mode="after")
    def _whole(self) -> Reward:
        if "." not in self.name and self.name not in BUILT_IN and self.name not in declared():
            raise ValueError(f"has '{self.name}'; allowed: {ALLOWED}{nearest(self.name, BUILT_IN)}")
        for owner, option in OPTIONS.items():
            said = getattr(self, option)
            if said is None and self.name == owner:
                raise ValueError(f"has {owner} without {option}; next: {{name: {owner}, {option}: …}}")
            if said is not None and self.name != owner:
                raise ValueError(f"has {option} beside {self.name}, and it belongs to {owner}; leave it out")
        if self.pattern is not None:
            if any(category(letter) == "Cc" and letter not in "\n\t" for letter in self.pattern):
                came = f"has the pattern {self.pattern!r}, where YAML's double quotes turned a backslash into a control"
                raise ValueError(f"{came} character; next: single quotes, '\\bword\\b'")
            try:
                re.compile(self.pattern)
            except re.error as error:
                came = f"has the pattern '{self.pattern}', which is no regular expression"
                raise ValueError(f"{came}: {error}") from error
        return self

    @property
    def shown(self) -> str:
        """The name in logs and reports: of a dotted name the last part, as TRL has it."""
        return self.name.rpartition(".")[2]


def declared() -> dict[str, EntryPoint]:
    """Return the rewards that installed packages declare, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def refuse_unagreed(rewards: Sequence[Reward], agreed: bool) -> None:
    """Raise UserError for a reward that could be any code on this machine, unless the user has `agreed` to run it.

    A recipe is a file that people share, and `subprocess.getoutput` is a function that returns something, too.
    """
    known = declared()
    for reward in rewards:
        package, _, function = reward.name.rpartition(".")
        if agreed or reward.name in BUILT_IN or reward.name in known or (package == TRL and function.isidentifier()):
            continue
        raise UserError(
            f"rewards has '{reward.name}', which would be imported and called on this machine; allowed without a word"
            f" of yours: {', '.join(BUILT_IN)}, {TRL}.NAME, and what packages declare as {ENTRY_POINTS}; next, where"
            f" you trust it: {AGREEMENT}=true on the command line"
        )


def refuse_alike(rewards: Sequence[Reward]) -> None:
    """Raise ValueError where two rewards have one name, or no weight counts."""
    names = [one.shown for one in rewards]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"has two rewards called {twice}, which no report could tell apart; give each once")
    if not any(one.weight for one in rewards):
        raise ValueError("has no reward with a weight other than 0; give one")


def choose(
    rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], *, agreed: bool = False
) -> tuple[list[Score], Choice[str]]:
    """Return the rewards' scores, and which there are; no function is imported or called yet, as a plan needs none.

    `rows` are a few of the training rows ({prompt, and answer where the data has one}). Raises UserError for a function
    to which the user has not `agreed`, and for a comparison with an answer that is not there.
    """
    refuse_unagreed(rewards, agreed)
    scores = []
    for reward in rewards:
        if reward.name in WITH_ANSWER and "answer" not in rows[0]:
            problem = f"rewards has {reward.name}, which compares with a reference answer"
            raise UserError(f"{problem}; next: data.columns.answer=COLUMN")
        options = {name: value for name in OPTIONS.values() if (value := getattr(reward, name)) is not None}
        scores.append(Score(reward.shown, partial(_function, reward.name), options, reward.answer_as))
    value = " + ".join(f"{one.weight:g} x {one.shown}" if one.weight != 1 else one.shown for one in rewards)
    words = {
        "exact": "the completion is the answer",
        "normalised": "the answer, but for case, punctuation and articles",
        "number": "the completion ends with the answer's number",
        "length": "at most {0.most} tokens",
        "format": "matches {0.pattern}",
    }
    told = (f"{one.shown}: {words.get(one.name, 'the installed function {0.name}').format(one)}" for one in rewards)
    return scores, Choice(value, "; ".join(told))


def try_out(rewards: Sequence[Reward], scores: Sequence[Score], rows: Sequence[Mapping[str, Any]]) -> None:
    """Import each reward's function and call it for a few rows, before a run trains.

    Raises UserError for a name without a function, and for one that cannot take the rows or returns something else
    than a number for each completion.
    """
    # The model is taken to have said each row's answer, or a full stop.
    said = [[{"role": "assistant", "content": str(row.get("answer") or ".")}] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    prompts = [row["prompt"] for row in rows]
    for reward, score in zip(rewards, scores, strict=True):
        lacking = [name for name in score.required() if name not in (*GIVEN, *rows[0], reward.answer_as)]
        if lacking:
            has = ", ".join((*GIVEN, *columns))
            hint = f"; next: {{name: {reward.name}, answer_as: {lacking[0]}}}" if "answer" in rows[0] else ""
            raise UserError(f"rewards has '{reward.name}', which takes {lacking[0]}; given are {has}{hint}")
        try:
            score(prompts=prompts, completions=said, completion_ids=[[0]] * len(rows), **columns)
        except ScoreError as error:
            raise UserError(f"rewards has '{reward.name}': {error}") from error


def _function(name: str) -> Callable[..., Any]:
    """Return the function of a reward's name. Raises UserError where there is none, or something else."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = declared().get(name)
    module, parts = _module(point.value.replace(":", ".") if point is not None else name)
    found: Any = module
    for part in parts:
        if not hasattr(found, part):
            raise UserError(f"rewards has '{name}', and {found.__name__} has no {part}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if inspect.iscoroutinefunction(found):
        raise UserError(f"rewards has '{name}', which is a coroutine function; allowed: a plain function")
    if inspect.isclass(found) or not callable(found):
        kind = "class" if inspect.isclass(found) else type(found).__name__
        raise UserError(f"rewards has '{name}', which is a {kind}; allowed: a function")
    function: Callable[..., Any] = found
    return function


def _module(name: str) -> tuple[Any, list[str]]:
    """Return the module that a dotted name begins with, the longest there is, and the rest of the name."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:end])
        try:
            return import_module(path), parts[end:]
        except Exception as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name is not None
            if not (absent and f"{path}.".startswith(f"{error.name}.")):  # type: ignore[attr-defined]
                raise UserError(f"rewards has '{name}', and importing {path} fails: {summary(error)}") from error
    raise UserError(f"rewards has '{name}', and no module {parts[0]} is installed; allowed: {ALLOWED}")
