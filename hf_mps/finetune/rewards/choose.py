"""The rewards of a recipe: how it names them, the functions behind the names, and how a trainer calls these.

The built-in functions have the signature of TRL's: every argument is a list with an entry for each completion.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from unicodedata import category

from pydantic import Field

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError, brief, nearest
from hf_mps.core.text import counted, summary
from hf_mps.finetune.recipe import schema
from hf_mps.metrics import squad

Completion = str | Sequence[Mapping[str, Any]]

# A number as people write it: with a sign, thousands' commas and a fraction.
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_MINUS = "\N{MINUS SIGN}"
# Where an answer is: behind GSM8K's four hashes (openai/grade-school-math, dataset.py), or in LaTeX's box.
_MARKS = (re.compile(r"####\s*(?P<answer>[^\n]*)"), re.compile(r"\\boxed\{(?P<answer>[^{}]*)\}"))


def exact(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 where a completion is the answer, white space around both aside, otherwise 0.0."""
    return [float(words(said).strip() == right.strip()) for said, right in zip(completions, answer, strict=True)]


def normalised(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 where a completion is the answer but for case, punctuation, articles and white space, else 0.0."""
    return [squad.exact_match(words(said), [right]) for said, right in zip(completions, answer, strict=True)]


def number(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 where a completion ends with the answer's number, as `final_number` reads both, otherwise 0.0."""
    pairs = [(final_number(words(said)), final_number(right)) for said, right in zip(completions, answer, strict=True)]
    return [float(said is not None and said == right) for said, right in pairs]


def length(completion_ids: Sequence[Sequence[int]], most: int, **_: Any) -> list[float]:
    """Return 1.0 for a completion of at most `most` tokens, and evenly less for longer ones: 0.0 from twice as many."""
    return [max(0.0, min(1.0, 2.0 - len(ids) / most)) for ids in completion_ids]


def matches(completions: Sequence[Completion], pattern: str, **_: Any) -> list[float]:
    """Return 1.0 where the regular expression `pattern` is found in a completion, otherwise 0.0; a dot is any letter.

    `^` and `$` are the completion's beginning and end.
    """
    found = re.compile(pattern, re.DOTALL)
    return [float(found.search(words(said)) is not None) for said in completions]


BUILT_IN: Mapping[str, Callable[..., list[float]]] = {
    "exact": exact,
    "normalised": normalised,
    "number": number,
    "length": length,
    "format": matches,
}
"""By the name that a recipe has."""
WITH_ANSWER = ("exact", "normalised", "number")
"""Those that compare with the row's reference answer."""
OPTIONS = {"length": "most", "format": "pattern"}
"""What else a reward is told, by the name of both."""


def words(completion: Completion) -> str:
    """Return a completion's text; TRL hands on what answers a conversation as a list with one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def final_number(text: str) -> Decimal | None:
    """Return the number that a text ends with, None where it holds none.

    Where an answer is marked (`#### 72`, `\\boxed{72}`) that is the last number of the last mark; otherwise the text's
    last one. 1,000 is 1000, and 72.0 is 72.
    """
    marked = [match for mark in _MARKS for match in mark.finditer(text)]
    if marked:
        text = max(marked, key=lambda match: match.start())["answer"]
    found: list[str] = _NUMBER.findall(text.replace(_MINUS, "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


GIVEN = ("prompts", "completions", "completion_ids")
"""What every function is given, beside the columns of the rows: lists with an entry for each completion."""


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
        try:
            # Not a text or a mapping, whose letters or keys might be numbers; a tensor without dimensions has no list.
            scores = None if isinstance(found, (str, bytes, Mapping)) else list(found)
            values = [None if score is None else float(score) for score in scores or ()]
        except (TypeError, ValueError, RuntimeError):
            values = []
        if len(values) != len(completions) or not all(value is None or math.isfinite(value) for value in values):
            came = f"the reward {self.__name__} returned {brief(repr(found))}"
            allowed = f"a list with a finite number, or None, for each of the {counted(len(completions), 'completion')}"
            raise ScoreError(f"{came}; allowed: {allowed}")
        return values


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
    """A built-in reward, one of trl.rewards, or a declared or importable function."""
    weight: float = 1.0
    """Its share of the sum."""
    most: int | None = Field(default=None, ge=1)
    """For length: the most tokens that score 1."""
    pattern: str | None = None
    """For format: the regular expression to find."""
    answer_as: str = "answer"
    """The keyword under which a function takes the reference answer."""

    def wrong(self) -> Iterator[str]:
        if "." not in self.name and self.name not in BUILT_IN and self.name not in declared():
            yield f"has '{self.name}'; allowed: {ALLOWED}{nearest(self.name, BUILT_IN)}"
        for owner, option in OPTIONS.items():
            said = getattr(self, option)
            if said is None and self.name == owner:
                yield f"has {owner} without {option}; next: {{name: {owner}, {option}: …}}"
            if said is not None and self.name != owner:
                yield f"has {option} beside {self.name}, and it belongs to {owner}; leave it out"
        if self.pattern is not None:
            if any(category(letter) == "Cc" and letter not in "\n\t" for letter in self.pattern):
                came = f"has the pattern {self.pattern!r}, where YAML's double quotes turned a backslash into a control"
                yield f"{came} character; next: single quotes, '\\bword\\b'"
            try:
                re.compile(self.pattern)
            except re.error as error:
                came = f"has the pattern '{self.pattern}', which is no regular expression"
                yield f"{came}: {error}"

    @property
    def shown(self) -> str:
        """The name in logs and reports: of a dotted name the last part, as TRL has it."""
        return self.name.rpartition(".")[2]


def declared() -> dict[str, EntryPoint]:
    """Return the rewards that installed packages declare, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def choose(
    rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], *, agreed: bool = False
) -> tuple[list[Score], Choice[str]]:
    """Return the rewards' scores, and which there are; no function is imported or called yet, as a plan needs none.

    `rows` are a few of the training rows ({prompt, and answer where the data has one}). Raises UserError for a function
    to which the user has not `agreed`, and for a comparison with an answer that is not there.
    """
    known, scores = declared(), []
    for reward in rewards:
        package, _, function = reward.name.rpartition(".")
        harmless = reward.name in BUILT_IN or reward.name in known or (package == TRL and function.isidentifier())
        if not (agreed or harmless):
            # A recipe is a file that people share, and `subprocess.getoutput` is a function, too.
            problem = f"rewards has '{reward.name}', which would be imported and called on this machine"
            free = f"{', '.join(BUILT_IN)}, {TRL}.NAME, and what packages declare as {ENTRY_POINTS}"
            way_on = f"next, where you trust it: {AGREEMENT}=true on the command line"
            raise UserError(f"{problem}; allowed without a word of yours: {free}; {way_on}")
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
    parts = (point.value.replace(":", ".") if point is not None else name).split(".")
    found: Any = None
    for end in range(len(parts) - 1, 0, -1):  # the longest module that the name begins with
        path = ".".join(parts[:end])
        try:
            found, parts = import_module(path), parts[end:]
            break
        except Exception as error:
            # Another module that is absent is one that this imports, which is a failure of its own.
            absent = isinstance(error, ModuleNotFoundError) and error.name is not None
            if not (absent and f"{path}.".startswith(f"{error.name}.")):  # type: ignore[attr-defined]
                raise UserError(f"rewards has '{name}', and importing {path} fails: {summary(error)}") from error
    if found is None:
        raise UserError(f"rewards has '{name}', and no module {parts[0]} is installed; allowed: {ALLOWED}")
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
