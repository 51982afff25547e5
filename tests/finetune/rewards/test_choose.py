"""A reward is a built-in one or an installed function; what cannot score is refused before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from pydantic import ValidationError

from hf_mps.core.errors import UserError
from hf_mps.finetune.rewards import choose
from hf_mps.finetune.rewards.choose import Reward, ScoreError
from tests.refusals import refusal

HERE = "tests.finetune.rewards.functions"
ROWS = [{"prompt": [{"role": "user", "content": f"{number} + 1?"}], "answer": str(number + 1)} for number in range(2)]


def chosen(*rewards: Reward, rows: Any = ROWS) -> list[Any]:
    scores, _ = choose.choose(rewards, rows, agreed=True)
    choose.try_out(rewards, scores, rows)
    return scores


def refused(reward: Reward, rows: Any = ROWS) -> str:
    with pytest.raises(UserError) as raised:
        chosen(reward, rows=rows)
    return str(raised.value).replace(HERE, "mine")


def said(*texts: str) -> dict[str, Any]:
    return {
        "prompts": [row["prompt"] for row in ROWS],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [[1] * len(text) for text in texts],
        "answer": [row["answer"] for row in ROWS],
    }


def test_built_in_and_installed_functions_score_alike() -> None:
    number, short, solved, sometimes = chosen(
        Reward(name="number"),
        Reward(name="length", most=2),
        Reward(name=f"{HERE}.solved", answer_as="solution"),
        Reward(name=f"{HERE}.sometimes"),
    )
    given = said("#### 1", "two")
    assert number(**given) == [1.0, 0.0]
    assert short(**given) == [0.0, 0.5]
    assert solved(**said("1", "two")) == [1.0, 0.0]
    assert sometimes(**given) == [1.0, None]
    assert solved.__name__ == "solved"


def test_a_function_of_trl_is_taken_as_it_is() -> None:
    (format_reward,) = chosen(Reward(name="trl.rewards.think_format_reward"))
    assert format_reward(**said("<think>x</think>y", "y")) == [1.0, 0.0]


def test_what_is_chosen_is_said_with_weights() -> None:
    told = choose.choose([Reward(name="number"), Reward(name=f"{HERE}.low", weight=0.5)], ROWS, agreed=True)[1]
    assert told.value == "number + 0.5 x low"
    assert told.reason == snapshot(
        "number: the completion ends with the answer's number; low: the installed function"
        " tests.finetune.rewards.functions.low"
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "nothing.here.good",
            snapshot(
                "rewards has 'nothing.here.good', and no module nothing is installed; allowed: exact, normalised,"
                " number, length, format, or the dotted name of an installed function, such as"
                " trl.rewards.think_format_reward"
            ),
        ),
        (f"{HERE}.lw", snapshot("rewards has 'mine.lw', and mine has no lw; did you mean 'low'?")),
        (f"{HERE}.CONSTANT", snapshot("rewards has 'mine.CONSTANT', which is a float; allowed: a function")),
        (f"{HERE}.Kind", snapshot("rewards has 'mine.Kind', which is a class; allowed: a function")),
        (
            f"{HERE}.later",
            snapshot("rewards has 'mine.later', which is a coroutine function; allowed: a plain function"),
        ),
        (
            f"{HERE}.too_few",
            snapshot(
                "rewards has 'mine.too_few': the reward too_few returned [1.0]; allowed: a list with a finite"
                " number, or None, for each of the 2 completions"
            ),
        ),
        (
            f"{HERE}.one_number",
            snapshot(
                "rewards has 'mine.one_number': the reward one_number returned 1.0; allowed: a list with a finite"
                " number, or None, for each of the 2 completions"
            ),
        ),
        (
            f"{HERE}.words",
            snapshot(
                "rewards has 'mine.words': the reward words returned ['good', 'good']; allowed: a list with a finite"
                " number, or None, for each of the 2 completions"
            ),
        ),
        (
            f"{HERE}.endless",
            snapshot(
                "rewards has 'mine.endless': the reward endless returned [inf, inf]; allowed: a list with a finite"
                " number, or None, for each of the 2 completions"
            ),
        ),
        (f"{HERE}.broken", snapshot("rewards has 'mine.broken': the reward broken failed: KeyError: 'score'")),
        (
            f"{HERE}.solved",
            snapshot(
                "rewards has 'mine.solved', which takes solution; given are prompts, completions, completion_ids,"
                " answer; next: {name: mine.solved, answer_as: solution}"
            ),
        ),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(name: str, problem: str) -> None:
    assert refused(Reward(name=name)) == problem


def test_a_function_of_anybody_is_refused_unless_the_user_agrees() -> None:
    assert refusal(choose.choose, [Reward(name="subprocess.getoutput", answer_as="cmd")], ROWS) == snapshot(
        "rewards has 'subprocess.getoutput', which would be imported and called on this machine; allowed without a word"
        " of yours: exact, normalised, number, length, format, trl.rewards.NAME, and what packages declare as"
        " hf_mps.rewards; next, where you trust it: trust_reward_code=true on the command line"
    )


@pytest.mark.parametrize("name", ["trl.rewards.think_format_reward", "polite"])
def test_a_function_of_trl_or_of_a_package_that_declares_it_needs_no_word(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "manners-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: manners\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[hf_mps.rewards]\npolite = {HERE}:sometimes\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = Reward(name=name)
    scores, _ = choose.choose([reward], ROWS)
    choose.try_out([reward], scores, ROWS)
    assert len(scores[0](**said("a", "b"))) == 2


def test_a_comparison_needs_an_answer() -> None:
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    assert refused(Reward(name="number"), rows) == snapshot(
        "rewards has number, which compares with a reference answer; next: data.columns.answer=COLUMN"
    )


def test_a_function_that_fails_later_ends_the_run_in_one_line() -> None:
    (score,) = chosen(Reward(name=f"{HERE}.low"))
    with pytest.raises(ScoreError, match="the reward low failed: ZeroDivisionError: division by zero"):
        score(completions=["", ""], completion_ids=[[], []])


@pytest.mark.parametrize(
    "section",
    [
        {"name": "numbr"},
        {"name": "length"},
        {"name": "number", "most": 3},
        {"name": "format", "pattern": "("},
        {"name": "format", "pattern": "\bword\b"},
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Reward(**section)
