"""Supervised fine-tuning: labels stand on the assistant's words alone, and the model answers the validation rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_mps.core import notices
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.tasks import sft
from hf_mps.finetune.text import chat
from tests.finetune import builders, tiny
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("own_cache")

CHATS = [
    [
        {"role": "user", "content": f"What is {number} and one?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": "Yes, the ball is red."},
    ]
    for number in range(12)
]


def chats(folder: Path, conversations: Any = CHATS) -> dict[str, Any]:
    train = str(tiny.write_jsonl(folder / "train.jsonl", [{"messages": one} for one in conversations]))
    validation = str(tiny.write_jsonl(folder / "validation.jsonl", [{"messages": one} for one in CHATS[:4]]))
    return {"files": {"train": train, "validation": validation}}


def test_labels_are_the_assistants_words_and_nothing_else(qwen3: str, tmp_path: Path) -> None:
    prepared = builders.prepare(task="sft", model=qwen3, data=chats(tmp_path), max_length=200, packing=False)
    tokenizer = prepared.processing_class
    for conversation, row in zip(CHATS, prepared.train, strict=True):
        assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(conversation, tokenize=False)
        learned = [label for label in row["labels"] if label != -100]
        assert (
            tokenizer.decode(learned) == f"{conversation[1]['content']}<|im_end|>{conversation[3]['content']}<|im_end|>"
        )
        assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))


def test_an_alpaca_row_and_the_same_conversation_are_one(qwen3: str, tmp_path: Path) -> None:
    asked, given, answer = "Add.", "2, 2", "It is 4."
    alpaca = str(tiny.write_jsonl(tmp_path / "a.jsonl", [{"question": asked, "input": given, "answer": answer}] * 2))
    said = [{"from": "human", "value": f"{asked}\n\n{given}"}, {"from": "gpt", "value": answer}]
    shared = str(tiny.write_jsonl(tmp_path / "s.jsonl", [{"conversations": said}] * 2))
    named = {"instruction": "question", "input": "input", "output": "answer"}
    one, other = (
        builders.prepare(
            task="sft",
            model=qwen3,
            data={"files": {"train": file, "validation": file}, "columns": columns},
            max_length=100,
        )
        for file, columns in ((alpaca, named), (shared, {"messages": "conversations"}))
    )
    assert one.validation[:] == other.validation[:]


def test_the_system_column_beside_a_conversation_is_read_where_named_and_told_of_where_not(
    qwen3: str, tmp_path: Path
) -> None:
    given = [{"conversations": one, "system": "You are brief."} for one in CHATS]
    file = str(tiny.write_jsonl(tmp_path / "rows.jsonl", given))
    named, heard = {"messages": "conversations"}, list[str]()
    data = {"files": {"train": file, "validation": file}, "columns": named}
    notices.forget()
    with notices.redirected(heard.append):
        without = builders.prepare(task="sft", model=qwen3, data=data, max_length=200).train[0]["input_ids"]
    assert heard == [
        f"{file}: the column 'system' is not read; next: data.columns.system=system puts its words before each"
        " conversation"
    ]
    data["columns"] = {**named, "system": "system"}
    made = builders.prepare(task="sft", model=qwen3, data=data, max_length=200).train[0]["input_ids"]
    same = [[{"role": "system", "content": "You are brief."}, *one] for one in CHATS]
    whole = builders.prepare(task="sft", model=qwen3, data=chats(tmp_path, same), max_length=200).train[0]["input_ids"]
    assert list(made) == list(whole) != list(without)
    twice = [{"conversations": one, "system": "Something else."} for one in same]
    data["files"] = {split: str(tiny.write_jsonl(tmp_path / "twice.jsonl", twice)) for split in data["files"]}
    made = builders.prepare(task="sft", model=qwen3, data=data, max_length=200).train[0]["input_ids"]
    assert list(made) == list(whole)


def test_rows_without_room_for_an_answer_are_left_out_and_counted(qwen3: str, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "Why? " * 200}, {"role": "assistant", "content": "So."}]
    prepared = builders.prepare(
        task="sft", model=qwen3, data=chats(tmp_path, [*CHATS, long]), max_length=120, packing=False
    )
    assert len(prepared.train) == len(CHATS)
    assert "left out, their prompt alone is max_length or longer: 1 train row" in prepared.choices["learned"].reason


def test_packed_rows_have_the_loss_of_single_ones(qwen3: str, tmp_path: Path) -> None:
    losses = []
    for packing in (False, True):
        prepared = builders.prepare(task="sft", model=qwen3, data=chats(tmp_path), max_length=256, packing=packing)
        model = prepared.model.to("mps").eval()
        total, count = 0.0, 0
        for row in range(len(prepared.train)):
            batch = prepared.collator([prepared.train[row]])
            labels = int((batch["labels"][:, 1:] != -100).sum())
            inputs = {name: value.to("mps") if hasattr(value, "to") else value for name, value in batch.items()}
            with torch.no_grad():
                total += float(model(**inputs).loss) * labels
            count += labels
        losses.append((total / count, count, len(prepared.train)))
    (alone, tokens, rows), (together, packed_tokens, packed_rows) = losses
    assert packed_rows < rows
    assert packed_tokens == tokens
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapters_learn_and_the_saved_model_answers_as_the_trained_one(qwen3: str, tmp_path: Path, export: str) -> None:
    from peft import AutoPeftModelForCausalLM

    prepared = builders.prepare(
        task="sft",
        model=qwen3,
        data=chats(tmp_path),
        max_length=200,
        lora={"r": 8, "export": export},
        generate={"rows": 3, "max_new_tokens": 6},
    )
    trainer = builders.trainer(prepared, tmp_path / "run", max_steps=20, learning_rate=2e-2, logging_steps=20)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_perplexity"] < 0.8 * prepared.baseline.metrics["perplexity"]
    prepared.save(trainer, tmp_path / "saved")
    rows = list(prepared.predict(trainer))
    assert [row["reference"] for row in rows] == ["Yes, the ball is red."] * 3
    kind = AutoModelForCausalLM if export == "merged" else AutoPeftModelForCausalLM
    trainer.model = kind.from_pretrained(tmp_path / "saved").to("mps")
    assert list(prepared.predict(trainer)) == rows
    assert (tmp_path / "saved" / "chat_template.jinja").is_file()


def test_a_row_that_is_no_conversation_is_refused_by_its_number(qwen3: str, tmp_path: Path) -> None:
    assert refusal(
        builders.prepare, task="sft", model=qwen3, data=chats(tmp_path, [*CHATS, CHATS[0][:1]]), max_length=200
    ).endswith(
        "train.jsonl: row 13 has no words of the assistant; allowed: at least one message of role assistant (or gpt)"
    )


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (None, "has no output; allowed: a text in every row"),
        (
            [{"role": "assistant", "content": "Blue."}],
            "has a list for its output; allowed: a text, or whole conversations",
        ),
    ],
)
def test_an_answer_that_is_no_text_is_told_by_what_it_is(output: Any, problem: str) -> None:
    with pytest.raises(chat.ConversationError, match=problem):
        sft.conversation({"instruction": "What colour is it?", "output": output})


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"messages": "chat", "output": "answer"}, "has messages beside output; give one or the other"),
        ({"output": "answer"}, "has output; give instruction and output, or messages"),
    ],
)
def test_half_a_shape_is_refused(qwen3: str, tmp_path: Path, columns: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        builders.recipe(task="sft", model=qwen3, data={**chats(tmp_path), "columns": columns})


def test_a_conversation_that_the_template_refuses_is_refused_by_its_number(qwen3: str, tmp_path: Path) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "own.jinja").write_text(refusing + chat.PLAIN, encoding="utf-8")
    prepared = builders.prepare(
        task="sft", model=qwen3, data=chats(tmp_path), chat_template=str(tmp_path / "own.jinja")
    )
    asked: list[dict[str, Any]] = [{"messages": [{"role": role, "content": "Hi"}]} for role in ("user", "system")]
    rows = Rows(Dataset.from_list(asked), "asked.jsonl")
    trainer = builders.trainer(prepared, tmp_path / "run", max_steps=1)
    with pytest.raises(UserError, match=r"^asked\.jsonl: row 2 is refused by the chat template: no system$"):
        list(prepared.answers(trainer, rows))
