"""Language models: perplexity is that of the mean token of a split, and blocks hold every token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mps.core.errors import UserError
from hf_mps.finetune.loss import deferred_head
from hf_mps.finetune.models.token_trainer import measured, perplexity, row_sums
from hf_mps.finetune.tasks import _language
from hf_mps.finetune.text import tokens
from hf_mps.metrics.selection import choose
from tests.finetune import builders, tiny
from tests.refusals import refusal


@pytest.fixture
def files(own_cache: Path, tmp_path: Path) -> dict[str, Any]:
    train, validation = tmp_path / "train.txt", tmp_path / "validation.txt"
    train.write_text("\n".join(builders.TEXTS * 3) + "\n", encoding="utf-8")
    validation.write_text("\n".join(builders.TEXTS[::-1]) + "\n", encoding="utf-8")
    return {"files": {"train": str(train), "validation": str(validation)}}


def by_hand(model: Any, rows: Any, shift: bool) -> float:
    """The mean loss a labelled token, each row by itself, from logits and logarithms."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]], device=model.device)
        labels = torch.tensor(row.get("labels", row["input_ids"]))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].cpu().double()
        if shift:
            logits, labels = logits[:-1], labels[1:]
        logarithms = logits.log_softmax(-1)
        for place, label in enumerate(labels.tolist()):
            if label != -100:
                total -= float(logarithms[place, label])
                count += 1
    return total / count


@pytest.mark.parametrize("optimizations", [True, False])
def test_causal_perplexity_is_that_of_the_mean_token(
    models: Path, files: dict[str, Any], tmp_path: Path, optimizations: bool
) -> None:
    place = str(builders.model(models, "qwen3"))
    prepared = builders.prepare(task="causal-lm", model=place, data=files, max_length=40, optimizations=optimizations)
    lengths = {len(row["input_ids"]) for row in prepared.validation}
    assert len(lengths) > 1, "a batch must be padded, and batches must differ in size"
    trainer = builders.trainer(prepared, tmp_path / "run")
    assert str(trainer.model.device).startswith("mps")
    found = trainer.evaluate()
    loss = by_hand(trainer.model.eval(), prepared.validation, shift=True)
    assert found["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    chosen = prepared.choices["loss"].value
    assert chosen == ("cross-entropy in chunks" if optimizations else "the model's own")


def test_masked_perplexity_is_that_of_the_mean_gap_and_the_same_in_every_evaluation(
    models: Path, files: dict[str, Any], tmp_path: Path
) -> None:
    place = str(builders.model(models, "bert"))
    prepared = builders.prepare(task="masked-lm", model=place, data=files, max_length=32, mlm_probability=0.3)
    again = builders.prepare(task="masked-lm", model=place, data=files, max_length=32, mlm_probability=0.3)
    assert prepared.validation[:] == again.validation[:]
    trainer = builders.trainer(prepared, tmp_path / "run")
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == second["eval_loss"]
    assert first["eval_loss"] == pytest.approx(
        by_hand(trainer.model.eval(), prepared.validation, shift=False), rel=1e-5
    )


def test_training_gaps_are_drawn_anew(models: Path, files: dict[str, Any]) -> None:
    prepared = builders.prepare(task="masked-lm", model=str(builders.model(models, "bert")), data=files, max_length=32)
    rows = [prepared.train[number] for number in range(4)]
    one, other = prepared.collator(rows), prepared.collator(rows)
    assert one["labels"].shape == one["input_ids"].shape
    assert (one["labels"] != other["labels"]).any()
    told = one["labels"] != -100
    ids = [row["input_ids"] + [-1] * (one["input_ids"].shape[1] - len(row["input_ids"])) for row in rows]
    assert all(one["labels"][row][place] == ids[row][place] for row, place in told.nonzero().tolist())


def test_the_untrained_model_is_the_baseline(models: Path, files: dict[str, Any], tmp_path: Path) -> None:
    place = str(builders.model(models, "qwen3"))
    prepared = builders.prepare(task="causal-lm", model=place, data=files, max_length=40)
    assert prepared.baseline.metrics == {}
    trainer = builders.trainer(prepared, tmp_path / "run")
    before = trainer.evaluate()
    trainer.state.log_history.clear()
    trainer.train()
    assert prepared.baseline.metrics["perplexity"] == pytest.approx(before["eval_perplexity"], rel=1e-6)
    assert set(prepared.baseline.metrics) == {"loss", "perplexity", "accuracy"}


def test_the_untrained_model_is_not_measured_where_the_recipe_says_so(models: Path, files: dict[str, Any]) -> None:
    place = str(builders.model(models, "qwen3"))
    off = {"eval_on_start": False}
    prepared = builders.prepare(task="causal-lm", model=place, data=files, max_length=40, training=off)
    assert prepared.baseline is None
    assert prepared.arguments_defaults == {}


def test_predictions_have_a_perplexity_for_each_block(models: Path, files: dict[str, Any], tmp_path: Path) -> None:
    prepared = builders.prepare(task="causal-lm", model=str(builders.model(models, "qwen3")), data=files, max_length=40)
    trainer = builders.trainer(prepared, tmp_path / "run")
    rows = list(prepared.predict(trainer))
    assert len(rows) == len(prepared.validation)
    tokens = sum(row["tokens"] for row in rows)
    mean = sum(row["loss"] * row["tokens"] for row in rows) / tokens
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean, rel=1e-6)
    assert rows[0]["perplexity"] == pytest.approx(math.exp(rows[0]["loss"]))


def test_a_last_block_of_one_token_has_nothing_to_predict(models: Path, tmp_path: Path, own_cache: Path) -> None:
    place = builders.model(models, "qwen3")
    file = tmp_path / "text.txt"
    file.write_text(builders.TEXTS[0], encoding="utf-8")
    data = {"files": {"train": str(file), "validation": str(file)}}
    length = len(AutoTokenizer.from_pretrained(place)(f"{builders.TEXTS[0]}\n", add_special_tokens=False).input_ids)
    prepared = builders.prepare(task="causal-lm", model=str(place), data=data, max_length=length - 1)
    whole, last = prepared.predict(builders.trainer(prepared, tmp_path / "run"))
    assert (whole["tokens"], last["tokens"]) == (length - 2, 0)
    assert set(last) == {"text", "tokens"}, "a loss or an accuracy of no token would be a number made up"


@pytest.mark.parametrize("optimizations", [True, False])
def test_a_steps_loss_is_that_of_the_tokens_that_it_predicts(
    models: Path, files: dict[str, Any], tmp_path: Path, optimizations: bool
) -> None:
    """GPT-2's class name tells transformers no loss, by which Trainer knows that a row's first token is no label."""
    place = str(builders.model(models, "gpt2"))
    prepared = builders.prepare(task="causal-lm", model=place, data=files, max_length=12, optimizations=optimizations)
    for module in prepared.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    still = {"learning_rate": 0.0, "per_device_train_batch_size": len(prepared.train), "max_steps": 1}
    trainer = builders.trainer(prepared, tmp_path / "run", **still, eval_on_start=False)
    trainer.train()
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert logged == pytest.approx(trainer.evaluate(prepared.train)["eval_loss"], rel=1e-5)


def test_blocks_hold_every_token_of_the_text_in_its_order(models: Path, files: dict[str, Any]) -> None:
    place = builders.model(models, "gpt2")
    prepared = builders.prepare(task="causal-lm", model=str(place), data=files, max_length=24)
    whole = AutoTokenizer.from_pretrained(place)(Path(files["files"]["train"]).read_text(encoding="utf-8"))["input_ids"]
    assert [token for row in prepared.train["input_ids"] for token in row] == whole
    assert {len(row) for row in prepared.train["input_ids"][:-1]} == {24}


def test_each_block_of_bert_is_framed_as_a_text(models: Path, files: dict[str, Any]) -> None:
    place = builders.model(models, "bert")
    tokenizer = AutoTokenizer.from_pretrained(place)
    around = tokens.special_tokens(tokenizer)
    assert around == tokens.SpecialTokens((tokenizer.cls_token_id,), (tokenizer.sep_token_id,))
    prepared = builders.prepare(task="masked-lm", model=str(place), data=files, max_length=24)
    for row in prepared.train["input_ids"]:
        assert (row[0], row[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert len(row) <= 24


def test_rows_that_are_whole_texts_end_with_the_end_token(models: Path, files: dict[str, Any]) -> None:
    place = builders.model(models, "gpt2")
    data = {**files, "end_of_text": True}
    prepared = builders.prepare(task="causal-lm", model=str(place), data=data, max_length=24)
    end = AutoTokenizer.from_pretrained(place).eos_token_id
    assert [token for row in prepared.train["input_ids"] for token in row].count(end) == len(builders.TEXTS) * 3


def test_sums_are_the_same_from_chunks_and_from_logits(models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(builders.model(models, "qwen3")).eval()
    ids = torch.randint(3, 390, (3, 17), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :5] = labels[1, 9:] = -100
    inputs = {"input_ids": ids, "labels": labels}
    with torch.no_grad():
        plain = row_sums(model, inputs, causal=True)
        assert deferred_head.install(model).value == deferred_head.CHUNKS
        chunked = row_sums(model, inputs, causal=True)
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-5)
    assert plain[:, 1].tolist() == [12, 8, 16]


def test_a_split_is_not_the_mean_of_its_rows() -> None:
    chosen = choose(None, ("perplexity", "accuracy"), "causal-lm")
    found = measured([[8.0, 2.0, 1.0], [2.0, 8.0, 8.0]], chosen)
    assert found == {"loss": 1.0, "perplexity": pytest.approx(math.e), "accuracy": 0.9}


def test_a_loss_too_large_for_a_perplexity_is_infinite() -> None:
    assert perplexity(1000.0) == math.inf


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"metrics": ["rouge"]},
            "metrics has 'rouge', which causal-lm does not compute; allowed: perplexity, accuracy",
        ),
        ({"task": "masked-lm"}, "its tokenizer has no mask token; allowed: a model such as BERT's"),
    ],
)
def test_what_cannot_be_is_refused(models: Path, files: dict[str, Any], values: dict[str, Any], problem: str) -> None:
    place = str(builders.model(models, "qwen3"))
    assert problem in refusal(
        builders.prepare, **{"task": "causal-lm", "model": place, "data": files, "max_length": 40, **values}
    )


def test_an_empty_text_is_refused(models: Path, tmp_path: Path, files: dict[str, Any]) -> None:
    path = str(tiny.write_jsonl(tmp_path / "gap.jsonl", [{"text": "a"}, {"text": None}]))
    data = {"files": {"train": path, "validation": files["files"]["validation"]}}
    with pytest.raises(UserError, match=r"gap\.jsonl: row 2 has no text; allowed: a text in every row"):
        builders.prepare(task="causal-lm", model=str(builders.model(models, "qwen3")), data=data, max_length=40)


def test_a_collator_pads_labels_with_what_no_loss_counts(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builders.model(models, "qwen3"))
    batch = _language.Labelled(tokenizer)([{"input_ids": [5, 6, 7]}, {"input_ids": [8], "labels": [9]}])
    assert batch["labels"].tolist() == [[5, 6, 7], [9, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
