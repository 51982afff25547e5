"""GRPO: what is rewarded becomes likelier, measured exactly, and a stopped run ends as an unbroken one."""

from __future__ import annotations

import fnmatch
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.core import notices
from hf_mps.finetune.models.group_trainer import Arguments
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.tasks.grpo import SETTLED, conversation
from hf_mps.finetune.text import chat
from tests.finetune import builders, tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command, Stop
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("own_cache")

LOW = "tests.finetune.rewards.functions.low"
SMALL = {"num_generations": 4, "max_completion_length": 8}
ASKED = {"role": "user", "content": "Is the ball red?"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(builders.model(tmp_path_factory.mktemp("models"), "qwen2"))


def prompts(folder: Path, count: int = 8) -> dict[str, Any]:
    rows = [{"question": f"Is the ball red, {number}?", "solution": number} for number in range(count)]
    file = str(tiny.write_jsonl(folder / "prompts.jsonl", rows))
    return {"files": {"train": file, "validation": file}, "columns": {"prompt": "question", "answer": "solution"}}


def prepared(model: str, folder: Path, training: dict[str, Any] | None = None, rows: int = 8, **said: Any) -> Any:
    values = {"rewards": LOW, "trust_reward_code": True, "max_length": 64, "data": prompts(folder, rows), **said}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    return builders.prepare(task="grpo", model=model, training=SMALL | sizes | (training or {}), **values)


def test_a_tiny_models_reward_rises_by_three_tenths_of_the_scale(place: str, tmp_path: Path) -> None:
    made = prepared(place, tmp_path)
    settings = {"max_steps": 16, "learning_rate": 2e-2, "lr_scheduler_type": "constant", "logging_steps": 4}
    trainer = builders.trainer(made, tmp_path / "run", **settings, per_device_train_batch_size=8)
    assert trainer.args.device.type == "mps"
    trainer.train()
    after = trainer.evaluate()
    before = made.baseline.metrics
    assert set(before) >= {"reward", "rewards/low/mean", "completions/mean_length"}
    assert 0 <= before["reward"] <= 0.65
    assert after["eval_reward"] > before["reward"] + 0.3
    drawn = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert drawn[-1] > drawn[0] + 0.2


def oracle(model: Any, prompt: list[int], length: int) -> tuple[list[int], Any]:
    """The likeliest completion of one prompt without a cache, and the logits behind each of its tokens."""
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].cpu().double()
        ids.append(int(logits[-1].argmax()))
        if ids[-1] in (model.generation_config.eos_token_id, model.config.eos_token_id):
            break
    return ids[len(prompt) :], logits


def test_an_evaluation_is_of_greedy_answers_and_their_divergence(place: str, tmp_path: Path) -> None:
    made = prepared(place, tmp_path, {"beta": 0.1}, lora={"r": 8}, rewards=[{"name": LOW, "weight": 2}, "number"])
    trainer = builders.trainer(made, tmp_path / "run", max_steps=4, learning_rate=2e-2, per_device_train_batch_size=8)
    trainer.train()
    found, again = trainer.evaluate(), trainer.evaluate()
    assert {name: found[name] for name in found if "eval_re" in name} == {
        name: again[name] for name in again if "eval_re" in name
    }
    model, rewards, divergences = trainer.model.eval(), [], []
    for row in made.validation:
        said, logits = oracle(model, row["prompt_ids"], SMALL["max_completion_length"])
        with model.disable_adapter():
            import torch

            whole = torch.tensor([row["prompt_ids"] + said], device=model.device)
            with torch.no_grad():
                theirs = model(input_ids=whole).logits[0].cpu().double().log_softmax(-1)
        ours = logits.log_softmax(-1)
        places = [len(row["prompt_ids"]) - 1 + step for step in range(len(said))]
        apart = [float(theirs[at, one] - ours[at, one]) for at, one in zip(places, said, strict=True)]
        divergences.append(sum(math.exp(each) - each - 1 for each in apart) / len(apart))
        rewards.append(sum(one < 200 for one in said) / len(said))
    assert found["eval_rewards/low/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert found["eval_kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-3, abs=1e-6)
    assert found["eval_kl"] > 0
    total = 2 * found["eval_rewards/low/mean"] + found["eval_rewards/number/mean"]
    assert found["eval_reward"] == pytest.approx(total)
    assert found["eval_loss"] == pytest.approx(0.1 * found["eval_kl"] - total, rel=1e-5)
    rows = list(made.predict(trainer))
    assert [row["reward_low"] for row in rows] == pytest.approx(rewards)
    assert rows[0]["prompt"].count("Is the ball red, 0?") == 1


@pytest.mark.rotated
@pytest.mark.parametrize("further", [[], ["lora={r: 4}", "training.beta=0.1", "training.num_iterations=2"]])
def test_a_stopped_run_draws_on_as_an_unbroken_one(
    place: str, tmp_path: Path, finetune: Command, stop: Stop, monkeypatch: pytest.MonkeyPatch, further: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(
        f"task: grpo\nmodel: {place}\nrewards: [{LOW}, number]\nmax_length: 64\n"
        f"data: {{files: {{train: {prompts(tmp_path)['files']['train']}, validation: prompts.jsonl}}, "
        "columns: {prompt: question, answer: solution}}\n"
        "training: {num_generations: 4, max_completion_length: 6, per_device_train_batch_size: 4, max_steps: 7, "
        "gradient_accumulation_steps: 2, learning_rate: 5e-3, logging_steps: 2, eval_strategy: steps, eval_steps: 4}\n",
        encoding="utf-8",
    )
    words = ("my.yaml", "trust_reward_code=true", *further)
    assert finetune(*words, "output_dir=whole").code == 0
    stop(5 + bool(further))  # of two iterations the first alone is done
    assert finetune(*words, "output_dir=run").code == 130
    ended = finetune(*words, "output_dir=run").finished()
    assert history(tmp_path / "run") == history(tmp_path / "whole")
    assert predictions(tmp_path / "run") == predictions(tmp_path / "whole")
    assert results(tmp_path / "run")["fallback"] == []
    assert "reward 0." in ended.out


def test_a_shared_recipe_runs_no_code_of_its_own(
    place: str, tmp_path: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Is the ball red?", "answer": "touch made"}] * 8)
    recipe = (
        f"task: grpo\nmodel: {place}\nmax_length: 64\nrewards: [{{name: subprocess.getoutput, answer_as: cmd}}]\n"
        "data: {files: {train: rows.jsonl, validation: rows.jsonl}, columns: {answer: answer}}\n"
        "training: {num_generations: 4, max_completion_length: 8}\n"
    )
    (tmp_path / "theirs.yaml").write_text(recipe, encoding="utf-8")
    (tmp_path / "agreeing.yaml").write_text(f"{recipe}trust_reward_code: true\n", encoding="utf-8")
    for words in (["theirs.yaml"], ["theirs.yaml", "--plan"], ["agreeing.yaml"], ["agreeing.yaml", "--plan"]):
        ended = finetune(*words)
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert "trust_reward_code=true" in ended.err
    # Who agrees has it called by a run, and by nothing that only looks.
    assert finetune("theirs.yaml", "trust_reward_code=true", "--plan").code == 0
    assert not (tmp_path / "made").exists()
    finetune("theirs.yaml", "trust_reward_code=true", "training.max_steps=1")
    assert (tmp_path / "made").exists()


def history(run: Path) -> list[dict[str, Any]]:
    """What a run logged, without what the clock says."""
    timed = ("step_time", "runtime", "per_second", "memory", "preparation")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timed)}
        for entry in results(run)["log_history"]
        if "train_runtime" not in entry
    ]


def test_rewards_that_never_differ_are_told(place: str, tmp_path: Path) -> None:
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 2}
    made = prepared(place, tmp_path, sizes, rewards=[{"name": "format", "pattern": "no such words"}])
    trainer = builders.trainer(made, tmp_path / "run", max_steps=8, per_device_train_batch_size=2, eval_on_start=False)
    heard: list[str] = []
    with notices.redirected(heard.append):
        trainer.train()
    assert heard == snapshot(
        [
            "the completions of each prompt scored alike in all of the first 8 steps, so nothing was learned; next: a"
            " reward that tells them apart, or a higher training.temperature"
        ]
    )


def test_a_saved_model_answers_prompts_as_its_run_did(
    place: str, tmp_path: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = prompts(tmp_path)["files"]["train"]
    words = [f"model={place}", f"data.train={file}", f"data.validation={file}", "data.prompt=question"]
    words += ["data.answer=solution", "training.max_steps=1", "training.max_completion_length=4"]
    assert finetune("grpo/gsm8k", *words, "training.gradient_accumulation_steps=4", "output_dir=run").code == 0
    tiny.write_jsonl(tmp_path / "asked.jsonl", [{"question": "Is the ball red, 3?"}])
    assert main(["predict", "run", "asked.jsonl", "--out", "answers.jsonl"], program="hf-mps") == 0
    answered = json.loads((tmp_path / "answers.jsonl").read_text(encoding="utf-8"))
    said = {row["prompt"]: row["generated"] for row in predictions(tmp_path / "run")}
    assert answered == {"prompt": answered["prompt"], "generated": said[answered["prompt"]]}


def test_each_epoch_has_an_order_of_its_own_that_follows_from_its_number(place: str, tmp_path: Path) -> None:
    trainer = builders.trainer(prepared(place, tmp_path), tmp_path / "run", per_device_train_batch_size=8)
    sampler, other = trainer._get_train_sampler(), trainer._get_train_sampler()
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    other.set_epoch(1)
    assert list(other) == orders[1] != orders[0]
    assert sorted(set(orders[0])) == list(range(8))
    assert len(sampler) == len(orders[0]) == 32


def test_a_reference_of_all_weights_stays_what_the_model_was(place: str, tmp_path: Path) -> None:
    made = prepared(place, tmp_path, {"beta": 0.05})
    trainer = builders.trainer(made, tmp_path / "run", learning_rate=1e-2, per_device_train_batch_size=8)
    assert trainer.evaluate()["eval_kl"] == pytest.approx(0, abs=1e-7)
    trainer.train()
    assert trainer.evaluate()["eval_kl"] > 1e-6
    assert made.choices["kl"].reason.startswith("times the divergence from a copy of the model before its first step")


@pytest.mark.parametrize(
    ("training", "said", "problem"),
    [
        (
            {"num_generations": 3},
            {},
            snapshot(
                "training.num_generations is 3, and 8 completions at once"
                " (training.per_device_train_batch_size x gradient_accumulation_steps, of all processes) are no whole"
                " groups of it; allowed: 2, 4, 8"
            ),
        ),
        ({"num_generations": 1}, {}, snapshot("training.num_generations is 1; allowed: 2 or more, which are compared")),
        (
            {"max_completion_length": 64},
            {},
            snapshot(
                "training.max_completion_length is 64, and max_length 64 holds prompt and completion; allowed: 1 to 63"
            ),
        ),
        (
            {"generation_batch_size": 12},
            {},
            snapshot("training.generation_batch_size is 12; allowed: a multiple of 8, a batch of all processes"),
        ),
        (
            {},
            {"metrics": ["kl"]},
            snapshot(
                "metrics has kl, and there is no reference to measure it from; next: training.beta=0.04, or lora={}"
            ),
        ),
        (
            {"max_completion_length": 60},
            {},
            snapshot(
                "prompts.jsonl: every prompt has more than 4 tokens, which max_length 64 leaves beside completions of"
                " 60; give a longer max_length"
            ),
        ),
    ],
)
def test_what_makes_no_groups_is_refused_in_one_line(
    place: str, tmp_path: Path, training: dict[str, Any], said: dict[str, Any], problem: str
) -> None:
    assert refusal(prepared, place, tmp_path, training, **said).removeprefix(f"{tmp_path}/") == problem


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("training.use_vllm=true", "training.use_vllm is not set here: completions are generated by transformers"),
        ("padding=list", "has padding, and prompts are as long as completions make them; give pad_to_multiple_of"),
        ("rewards=[nmber]", "rewards.0 has 'nmber'; allowed: exact, normalised, number"),
        ("rewards=[number, number]", "has two rewards called number, which no report could tell apart"),
        ("rewards=[{name: number, weight: 0}]", "has no reward with a weight other than 0"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(finetune: Command, word: str, problem: str) -> None:
    assert problem in finetune("grpo/gsm8k", word).refused()


def test_too_few_prompts_for_a_step_are_refused(place: str, tmp_path: Path) -> None:
    made = prepared(place, tmp_path, rows=1)
    assert refusal(made.epoch, {}) == snapshot(
        "1 training row, and a step learns from 2 prompts; allowed: more rows, or a smaller"
        " training.gradient_accumulation_steps or training.per_device_train_batch_size"
    )


def test_an_epoch_is_counted_in_completions(place: str, tmp_path: Path) -> None:
    made = prepared(place, tmp_path, rows=9)
    found = made.epoch({"num_iterations": 2})
    assert (found.value, found.reason) == snapshot(
        (64, "8 prompts with 4 completions each, each 2 times; 1 prompt of each epoch's order too few for a step")
    )


def test_a_prompt_is_a_text_or_messages_behind_the_systems_words() -> None:
    system = {"role": "system", "content": "Be short."}
    assert conversation({"prompt": "Is the ball red?"}) == [ASKED]
    assert conversation({"prompt": [ASKED]}, "Be short.") == [system, ASKED]
    with pytest.raises(chat.ConversationError, match="has a prompt whose last words are the assistant's"):
        conversation({"prompt": [ASKED, {"role": "assistant", "content": "Yes."}]})
    with pytest.raises(chat.ConversationError, match="has a system message beside system_prompt"):
        conversation({"prompt": [system, ASKED]}, "Be long.")


def test_the_fields_are_those_of_trl(tmp_path: Path) -> None:
    from trl import GRPOConfig

    ours = Arguments(output_dir=str(tmp_path))
    assert not ours.bf16
    assert not ours.gradient_checkpointing
    fields = set(GRPOConfig.__dataclass_fields__)
    assert set(Arguments.__dataclass_fields__) == fields
    assert all(fnmatch.filter(fields, pattern) for pattern in SETTLED)
    assert {name for name in fields if "vllm" in name} <= set(training_section.set_elsewhere(SETTLED, fields))


def test_a_smoke_run_of_no_completions_is_refused_in_one_line(finetune: Command) -> None:
    assert (
        finetune("grpo/gsm8k", "--smoke", "training.num_generations=0").refused()
        == "training.num_generations is 0; allowed: 2 or more, which are compared"
    )
