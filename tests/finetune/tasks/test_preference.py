"""What a model learns from preferences is what TRL's own trainers teach it: DPO, ORPO and KTO, loss by loss."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from inline_snapshot import snapshot
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.tasks.preferences import wanted
from hf_mps.finetune.text import chat
from tests.finetune import builders, tiny
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("own_cache")

# The first token is in front and the end token ends an answer, where TRL's ORPO puts them if they are not there.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
YES, NO = "Yes, it is a big red ball.", "The dog ran to the tree."
# Of one batch size for training and evaluation, whose rows TRL's KTO pairs by it.
STEPS = {"max_steps": 6, "learning_rate": 1e-2, "train_sampling_strategy": "sequential", "use_cpu": True}


def pairs(number: int) -> dict[str, Any]:
    answers = (YES, NO) if number % 3 else ("Yes.", "No, and the moon was far away.")
    return dict(zip(("chosen", "rejected"), answers, strict=True))


def conversations(number: int) -> list[dict[str, str]]:
    before = [{"role": "system", "content": "Be brief."}] if number % 2 else []
    return [*before, {"role": "user", "content": f"Is the ball red, {number}?"}]


def unpaired(number: int) -> dict[str, Any]:
    return {"completion": (YES, NO, "Yes.", "The moon.")[number % 4], "label": number % 4 in (0, 2)}


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


ROWS = {
    "dpo": [{"prompt": conversations(n), **{side: answer(text) for side, text in pairs(n).items()}} for n in range(13)],
    "kto": [
        {"prompt": conversations(n), **unpaired(n), "completion": answer(unpaired(n)["completion"])} for n in range(13)
    ],
}
ROWS["orpo"] = ROWS["dpo"]
COLUMNS = {"dpo": {"prompt": "prompt"}, "orpo": {"prompt": "prompt"}, "kto": {"completion": "completion"}}


def theirs(task: str) -> tuple[type[Any], type[Any]]:

    import trl

    if task != "orpo":
        return getattr(trl, f"{task.upper()}Config"), getattr(trl, f"{task.upper()}Trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    return ORPOConfig, ORPOTrainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.rotated("-")  # of each task one of the two
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("task", ["dpo", "orpo", "kto"])
def test_each_steps_loss_is_that_of_trls_own_trainer(task: str, adapters: bool, qwen3: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    file = str(tiny.write_jsonl(tmp_path / "rows.jsonl", ROWS[task]))
    data = {"files": {"train": file, "validation": file}, "columns": COLUMNS[task]}
    lora = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]} if adapters else None
    set_seed(1)
    prepared = builders.prepare(
        task=task, model=qwen3, data=data, max_length=46, chat_template=str(template), lora=lora, seed=1
    )
    started = {name: weight.clone() for name, weight in prepared.model.state_dict().items()}
    ours = builders.trainer(prepared, tmp_path / "ours", **STEPS)
    ours.train()
    ours_after = ours.evaluate()

    config, kind = theirs(task)
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1, "seed": 1}
    settings |= {"report_to": "none", "save_strategy": "no", "bf16": False, "gradient_checkpointing": False}
    stock = kind(
        model=model,
        args=config(output_dir=str(tmp_path / "theirs"), max_length=46, disable_tqdm=True, **settings, **STEPS),
        train_dataset=Dataset.from_list(ROWS[task]),
        eval_dataset=Dataset.from_list(ROWS[task]),
        processing_class=tokenizer,
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM") if lora else None,
    )
    if adapters:  # the same draw of the adapters' first weights
        stock.model.load_state_dict(started, strict=False)
    stock.train()
    stock_after = stock.evaluate()
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    assert len(losses(ours)) == 6
    assert losses(ours)[-1] < losses(ours)[0]
    assert ours_after["eval_loss"] == pytest.approx(stock_after["eval_loss"], rel=1e-5)


def test_the_rewards_of_a_pair_are_beta_times_the_mean_log_probability_of_its_tokens(
    qwen3: str, tmp_path: Path
) -> None:
    """ORPO has no reference: an answer is rewarded by how likely it is, whatever its length."""
    rows = [{"prompt": f"Is it red, {n}?", "chosen": YES, "rejected": NO} for n in range(6)]
    file = str(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows))
    data = {"files": {"train": file, "validation": file}, "columns": {"prompt": "prompt"}}
    prepared = builders.prepare(task="orpo", model=qwen3, data=data, max_length=100)
    trainer = builders.trainer(prepared, tmp_path / "run", learning_rate=1e-2, max_steps=4)
    assert trainer.args.device.type == "mps"
    trainer.train()
    found = trainer.evaluate()
    expected = []
    for row in prepared.validation:
        sides = []
        for side in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[side]], device="mps")
            with torch.no_grad():
                said = trainer.model(input_ids=ids).logits[0, :-1].cpu().double().log_softmax(-1)
            each = said.gather(1, ids[0, 1:, None].cpu())[-len(row[side]) :]
            sides.append(0.1 * float(each.mean()))
        expected.append(sides)
    answers = list(prepared.predict(trainer))
    rewards = [(row["reward_chosen"], row["reward_rejected"]) for row in answers]
    assert rewards == [pytest.approx(sides, rel=1e-4) for sides in expected]
    assert [row["right"] for row in answers] == [better > worse for better, worse in expected]
    assert found["eval_rewards/margins"] == pytest.approx(sum(a - b for a, b in expected) / len(expected), rel=1e-3)


def test_a_pair_is_two_answers_to_kto_as_trl_takes_them_apart(qwen3: str, tmp_path: Path) -> None:
    from trl import unpair_preference_dataset

    rows = [{"prompt": f"Is it red, {n}?", **pairs(n)} for n in range(6)]
    file = str(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows))
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    data = {"files": {"train": file, "validation": file}, "columns": columns}
    prepared = builders.prepare(task="kto", model=qwen3, data=data, max_length=100)
    decode = prepared.processing_class.decode
    ours = {(decode(row["completion_ids"], skip_special_tokens=True), row["label"]) for row in prepared.train}
    apart = unpair_preference_dataset(Dataset.from_list(rows))
    assert ours == {(row["completion"], row["label"]) for row in apart}
    assert len(prepared.train) == len(apart) == 12
    assert prepared.choices["rows"].value == "12 + 12"
    assert prepared.choices["rows"].reason.endswith("50% of the training ones are wanted")


def test_each_prompt_of_a_batch_is_paired_with_the_answer_to_another(qwen3: str, tmp_path: Path) -> None:
    file = str(tiny.write_jsonl(tmp_path / "rows.jsonl", ROWS["kto"]))
    data = {"files": {"train": file, "validation": file}}
    prepared = builders.prepare(task="kto", model=qwen3, data=data, max_length=100)
    rows = [dict(prepared.train[qwen3]) for qwen3 in (7, 2, 5)]
    batch = prepared.collator(rows)
    for prefix, order in (("", (0, 1, 2)), ("KL_", (2, 0, 1))):
        for place_, other in enumerate(order):
            ids, mask = batch[f"{prefix}input_ids"][place_], batch[f"{prefix}completion_mask"][place_].bool()
            assert ids[mask].tolist() == rows[other]["completion_ids"]
            assert ids[: len(rows[place_]["prompt_ids"])].tolist() == rows[place_]["prompt_ids"]
    assert batch["label"].tolist() == [row["label"] for row in rows]


@pytest.mark.parametrize(("yes", "no"), [(True, False), (1, 0), ("true", "false"), ("True", "False"), ("1", "0")])
def test_a_label_is_a_switch_a_number_or_a_word(yes: object, no: object) -> None:
    assert wanted({"label": yes})
    assert not wanted({"label": no})


@pytest.mark.parametrize("label", [None, 2, "good", 0.5, [True]])
def test_any_other_label_is_refused(label: object) -> None:
    with pytest.raises(chat.ConversationError) as raised:
        wanted({"label": label})
    assert str(raised.value) == f"has the label {label!r}; allowed: true, false, 1, 0"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["data.columns={chosen: a, completion: b}"],
            snapshot(
                "command line: data.columns has chosen, completion; give chosen and rejected, or completion and label"
            ),
        ),
        (
            ["data.columns={completion: null, label: null, chosen: a}"],
            snapshot("command line: data.columns has chosen; give chosen and rejected, or completion and label"),
        ),
        (
            ["training.per_device_train_batch_size=1"],
            snapshot(
                "RECIPE: the recipe has training.per_device_train_batch_size: 1, which leaves a prompt without"
                " another answer to be paired with; give 2 or more"
            ),
        ),
        (
            ["training.precompute_ref_log_probs=true"],
            snapshot(
                "command line: training.precompute_ref_log_probs is not set here: each prompt is paired with another"
                " answer of its batch; leave it out"
            ),
        ),
        (
            ["training.max_length=3"],
            snapshot(
                "command line: training.max_length is not set here: it is a key of the recipe itself: max_length: N"
            ),
        ),
    ],
)
def test_what_kto_cannot_do_is_one_line(words: list[str], line: str) -> None:
    assert refusal(load_recipe, "kto/kto-mix", words).replace(str(catalogue.find("kto/kto-mix").path), "RECIPE") == line


def test_validation_rows_of_one_label_have_no_margin(qwen3: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"Is it red, {n}?", "completion": YES, "label": True} for n in range(4)]
    file = str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))
    assert refusal(
        builders.prepare, task="kto", model=qwen3, data={"files": {"train": file, "validation": file}}, max_length=100
    ) == snapshot("every row of validation has the label true; allowed: rows of both, to be told apart")
