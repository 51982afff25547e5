"""Packed examples: as many in a row as fit, and each trained on as if it stood alone."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from datasets import Dataset
from inline_snapshot import snapshot
from transformers import Trainer, TrainingArguments

from hf_mps.finetune.loss import deferred_head
from hf_mps.finetune.text import packing
from hf_mps.finetune.text.packing import Collator, Packed, best_fit
from tests.finetune.text.test_lengths import recipe
from tests.refusals import refusal

WORDS = 61
SIZE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def models() -> dict[str, Any]:
    """Tiny models by name, made when they are asked for."""
    gpt2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    opt = {"vocab_size": WORDS, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 1}
    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZE)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZE, head_dim=16, tie_word_embeddings=True)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, **still, bos_token_id=0, eos_token_id=0)),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**opt, num_attention_heads=2)),
        "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=1)),
    }


def made(name: str) -> Any:
    """The model called `name`, with the same weights at each call."""
    torch.manual_seed(0)
    return models()[name]()


def examples(number: int = 12, seed: int = 0) -> Dataset:
    """Examples of 1 to 20 tokens; the first half of each, the prompt, is not learned."""
    draw = random.Random(seed)
    ids = [[draw.randrange(1, WORDS) for _ in range(draw.randint(1, 20))] for _ in range(number)]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def sizes(data: Dataset) -> list[int]:
    """The examples' lengths."""
    return [len(row) for row in data["input_ids"]]


def test_every_example_is_placed_once_and_no_row_overflows() -> None:
    draw = random.Random(3)
    counts = [draw.randint(1, 30) for _ in range(500)]
    rows = best_fit(counts, 64)
    assert sorted(number for row in rows for number in row) == list(range(500))
    assert max(sum(counts[number] for number in row) for row in rows) <= 64
    fewest = -(-sum(counts) // 64)
    assert len(rows) <= fewest + 1
    assert best_fit([5, 3, 2, 5, 5], 10) == [[0, 3], [4, 1, 2]]
    with pytest.raises(ValueError, match="example 1 has 65 tokens, more than a row of 64"):
        best_fit([1, 65], 64)


def test_a_row_holds_examples_side_by_side_and_its_rest_is_a_stranger_too() -> None:
    data = Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [5, 6], [7]], "labels": [[-100, 2, 3, 4], [5, 6], [7]]})
    packed = Packed(data, [4, 2, 1], capacity=9, filler=0)
    assert (len(packed), packed.examples, packed.batch(32)) == (1, 3.0, 11)
    assert packed[0] == {
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 0, 0],
        "labels": [-100, 2, 3, 4, -100, 6, -100, -100, -100],
        "position_ids": [0, 1, 2, 3, 0, 1, 0, 0, 1],
    }
    bare = Packed(data.select_columns(["input_ids"]), [4, 2, 1], capacity=7, filler=0)
    assert bare[0]["labels"] == [-100, 2, 3, 4, -100, 6, -100]


@pytest.mark.parametrize("chunks", [False, True], ids=["plain", "chunks"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_loss_and_gradients_are_those_of_the_examples_alone(name: str, attention: str, chunks: bool) -> None:
    model = made(name)
    model.set_attn_implementation(attention)
    model.to("mps").train()
    alone = copy.deepcopy(model)
    if chunks:
        assert deferred_head.install(model).value == deferred_head.CHUNKS
    data = examples()
    packed = Packed(data, sizes(data), capacity=32, filler=0)
    assert 1 < len(packed) < len(data) / 2
    learned = sum(label != -100 for row in data["labels"] for label in row[1:])
    batch = Collator(pytest.fail)([packed[number] for number in range(len(packed))])
    loss = model(**{key: one.to("mps") if torch.is_tensor(one) else one for key, one in batch.items()}).loss
    loss.backward()
    total = 0.0
    for row in data:
        ids, labels = (torch.tensor([row[key]], device="mps") for key in ("input_ids", "labels"))
        one = alone(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(learned)).loss
        one.backward()
        total += one.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=2e-6)


def test_a_model_that_would_let_examples_see_each_other_is_found_out() -> None:
    counts = [3, 9, 5, 12] * 8
    assert packing.decide(recipe(), None, made("opt"), counts, 32).reason == snapshot(
        "OPTForCausalLM lets packed examples see each other"
    )
    assert packing.decide(recipe(), None, made("mamba"), counts, 32).reason == snapshot(
        "MambaForCausalLM takes no position_ids, so that packed examples would see each other"
    )
    assert refusal(packing.decide, recipe(), True, made("opt"), counts, 32) == snapshot(
        "packing is true, and OPTForCausalLM lets packed examples see each other; next: packing=false"
    )


def test_packing_is_a_choice_with_a_reason() -> None:
    model, counts = made("llama"), [3, 9, 5, 12] * 8
    chosen = packing.decide(recipe(), None, model, counts, 32)
    assert (chosen.value, chosen.reason) == (
        True,
        snapshot(
            "32 examples in 8 rows of 32 tokens, 9.4% padding (39.6% in batches of like length); none sees another"
        ),
    )
    assert packing.decide(recipe(), True, model, counts, 32).reason == "packing in the recipe"
    assert packing.decide(recipe(), False, model, counts, 32).reason == "packing in the recipe"
    assert not packing.decide(recipe(), False, model, counts, 32).value
    off = packing.decide(recipe(optimizations=False), None, model, counts, 32)
    assert (off.value, off.reason) == (False, snapshot("optimizations is false in the recipe"))
    for long, reason in (
        ([32] * 9, "no less padding than batches of like length have: 0.0% against 0.0%"),
        ([18, 24, 30] * 9, "no less padding than batches of like length have: 25.0% against 10.0%"),
    ):
        left = packing.decide(recipe(), None, model, long, 32)
        assert (left.value, left.reason) == (False, reason)
    assert model.training


def test_trainer_trains_on_packed_rows_and_a_cache_is_never_asked_for(tmp_path: Path) -> None:
    data = examples(40)
    packed = Packed(data, sizes(data), capacity=32, filler=0)
    model = made("llama")
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, words: seen.append(words), with_kwargs=True)
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none", use_cache=True
    )

    def unpacked(rows: list[Any]) -> dict[str, Any]:
        return {key: torch.tensor([rows[0][key]]) for key in ("input_ids", "labels")}

    trainer = Trainer(model, arguments, Collator(unpacked), packed, eval_dataset=data.select([1, 3]))
    assert trainer.train().global_step == 3
    assert [words["input_ids"].shape for words in seen] == [(4, 32)] * 3
    assert all(words["use_cache"] is False and "attention_mask" not in words for words in seen)
    seen.clear()
    trainer.evaluate()
    assert "position_ids" not in seen[0]
