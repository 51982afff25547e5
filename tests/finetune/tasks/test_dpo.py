"""Preferences: rewards are those of TRL's own loss, of every pair alike, on the device mps."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.finetune.models.preference_trainer import PairArguments
from hf_mps.finetune.tasks import _language
from hf_mps.finetune.tasks.preferences import conversation
from hf_mps.finetune.text import chat
from tests.finetune import builders, tiny

pytestmark = pytest.mark.usefixtures("own_cache")

ASKED = {"role": "user", "content": "Is the ball red?"}


def pairs(folder: Path) -> dict[str, Any]:
    rows = [
        {
            "question": f"Is the ball red, {number}?",
            "chosen": "Yes, it is a big red ball." if number % 3 else "Yes.",
            "rejected": "The moon." if number % 2 else "The dog ran to the tree to find a bird.",
        }
        for number in range(10)
    ]
    file = str(tiny.write_jsonl(folder / "pairs.jsonl", rows))
    return {"files": {"train": file, "validation": file}, "columns": {"prompt": "question"}}


def log_probability(model: Any, prompt: list[int], answer: list[int]) -> float:
    """The sum of an answer's logarithms, one row by itself."""
    ids = torch.tensor([prompt + answer], device=model.device)
    with torch.no_grad():
        logarithms = model(input_ids=ids).logits[0].cpu().double().log_softmax(-1)
    return sum(float(logarithms[len(prompt) + place - 1, token]) for place, token in enumerate(answer))


def test_rewards_are_beta_times_the_change_of_each_answers_probability(qwen3: str, tmp_path: Path) -> None:
    prepared = builders.prepare(task="dpo", model=qwen3, data=pairs(tmp_path), max_length=100, lora={"r": 8})
    trainer = builders.trainer(
        prepared, tmp_path / "run", max_steps=6, learning_rate=1e-2, per_device_eval_batch_size=3
    )
    assert trainer.args.device.type == "mps"
    assert trainer.args.beta == 0.1
    first = trainer.evaluate()
    assert first["eval_loss"] == pytest.approx(math.log(2), rel=1e-5)
    trainer.train()
    found = trainer.evaluate()
    model = trainer.model.eval()
    expected = []
    for row in prepared.validation:
        sides = []
        for side in ("chosen_ids", "rejected_ids"):
            ours = log_probability(model, row["prompt_ids"], row[side])
            with model.disable_adapter():
                sides.append(0.1 * (ours - log_probability(model, row["prompt_ids"], row[side])))
        expected.append(sides)
    margins = [better - worse for better, worse in expected]
    assert found["eval_rewards/accuracies"] == sum(margin > 0 for margin in margins) / len(margins)
    assert found["eval_rewards/margins"] == pytest.approx(sum(margins) / len(margins), rel=1e-3)
    assert found["eval_rewards/margins"] > 0
    # Saving merges and takes apart again: the model is measured against its own start as before.
    prepared.save(trainer, tmp_path / "saved")
    rows = list(prepared.predict(trainer))
    assert [row["reward_chosen"] for row in rows] == pytest.approx([pair[0] for pair in expected], rel=1e-3, abs=1e-4)
    assert rows[0]["chosen"] == "Yes."
    assert not list((tmp_path / "run").glob("README.md"))


def test_a_second_trainer_of_a_model_makes_its_reference_anew(qwen3: str, tmp_path: Path) -> None:
    """`hf-mps plan` takes steps of several lengths with one model."""
    prepared = builders.prepare(task="dpo", model=qwen3, data=pairs(tmp_path), max_length=100, lora={"r": 8})
    builders.trainer(prepared, tmp_path / "first", max_steps=3, learning_rate=1e-2).train()
    found = builders.trainer(prepared, tmp_path / "second").evaluate()
    assert found["eval_rewards/margins"] == 0.0


def test_no_telemetry_is_sent(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.base_trainer

    monkeypatch.setattr(
        trl.trainer.base_trainer, "send_telemetry", Mock(side_effect=AssertionError("telemetry was sent"))
    )
    prepared = builders.prepare(task="dpo", model=qwen3, data=pairs(tmp_path), max_length=100, lora={})
    builders.trainer(prepared, tmp_path / "run")


def test_the_longer_answer_is_the_baseline(qwen3: str, tmp_path: Path) -> None:
    prepared = builders.prepare(task="dpo", model=qwen3, data=pairs(tmp_path), max_length=100, lora={})
    longer = [len(row["chosen_ids"]) > len(row["rejected_ids"]) for row in prepared.validation]
    assert prepared.baseline.metrics == {"rewards/accuracies": sum(longer) / len(longer)}
    assert 0 < sum(longer) < len(longer)


def test_precision_and_checkpointing_are_not_turned_on_by_themselves(tmp_path: Path) -> None:
    from trl import DPOConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL's own default says it by the older name
        theirs = DPOConfig(output_dir=str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        ours = PairArguments(output_dir=str(tmp_path))
    assert theirs.bf16
    assert not ours.bf16
    assert not ours.gradient_checkpointing
    assert set(vars(ours)) == set(vars(theirs))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Is the ball red?", "chosen": "Yes", "rejected": "No"},
        {"prompt": [ASKED], "chosen": {"from": "gpt", "value": "Yes"}, "rejected": {"from": "gpt", "value": "No"}},
        *(
            {
                **prompt,
                "chosen": [ASKED, {"role": "assistant", "content": "Yes"}],
                "rejected": [ASKED, {"role": "assistant", "content": "No"}],
            }
            for prompt in ({}, {"prompt": ASKED["content"]})  # UltraFeedback's rows have it twice
        ),
    ],
)
def test_every_usual_shape_of_a_pair_is_read(row: dict[str, Any]) -> None:
    assert conversation(row) == ([ASKED], "Yes", "No")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"chosen": "Yes", "rejected": "No"},
            "has no prompt; name its column with data.columns.prompt, or let each answer be a conversation that begins"
            " with it",
        ),
        (
            {"chosen": [ASKED, {"role": "assistant", "content": "Yes"}], "rejected": "No"},
            "has answers to two different prompts; allowed: two answers to one",
        ),
        (
            {
                "prompt": "Is it big?",
                "chosen": [ASKED, {"role": "assistant", "content": "Yes"}],
                "rejected": [ASKED, {"role": "assistant", "content": "No"}],
            },
            "has a prompt that its answers do not begin with; next: data.columns.prompt=null",
        ),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": None}, "has no rejected answer; allowed: a text, or messages"),
        ({"prompt": "Hi", "chosen": 1, "rejected": 0}, "has a int for its chosen answer; allowed: a text, or messages"),
        (
            {"prompt": "Hi", "chosen": [ASKED], "rejected": "No"},
            "has a chosen answer whose last words are the user's, not the assistant's",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(chat.ConversationError) as raised:
        conversation(row)
    assert str(raised.value) == problem


def test_equal_answers_are_told_of(qwen3: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "Yes", "rejected": "No" if n else "Yes"} for n in range(4)]
    place = str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))
    data = {"files": {"train": place, "validation": place}, "columns": {"prompt": "prompt"}}
    told = "rows.jsonl: 1 of 4 pairs have two equal answers, which no reward can tell apart; next: leave them out"
    with pytest.warns(UserWarning, match=told):
        builders.prepare(task="dpo", model=qwen3, data=data, max_length=100, lora={})


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_trl_absent_is_one_line(qwen3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setattr(_language, "find_spec", lambda name: None)
    rows = str(tiny.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4))
    data: dict[str, Any] = {"files": {"train": rows, "validation": rows}}
    more = {"rewards": "tests.finetune.rewards.functions.low", "trust_reward_code": True} if task == "grpo" else {}
    told = rf"task {task}: trl is not installed; next: pip install 'peft>=0.15' 'trl>=1.16'"
    with pytest.raises(UserError, match=told):
        builders.prepare(task=task, model=qwen3, data=data, max_length=100, **more)
