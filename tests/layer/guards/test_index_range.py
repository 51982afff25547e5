"""Ids and labels out of range: what is refused where, and that no run is that only looks so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inline_snapshot import snapshot
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    default_data_collator,
)

from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.finetune.loss import deferred_head
from hf_mps.layer import guards
from hf_mps.layer.guards.catalogue import GUARDS
from hf_mps.layer.guards.numerics.index_range import LOOKS, LOOKUPS
from hf_mps.metal.simulator import strictness
from tests.layer.guards import loops
from tests.refusals import refusal

LENGTH = loops.LENGTH


def kernels() -> list[str]:
    return [torch._C._dispatch_dump(f"aten::{name}") for name in LOOKUPS]


def labelled(labels: Any) -> list[dict[str, Any]]:
    """The usual rows with the labels that `labels(row's number)` gives."""
    return [row | {"labels": labels(number)} for number, row in enumerate(loops.rows())]


def epoch(model: nn.Module, data: list[dict[str, Any]], loss: Callable[[Any, dict[str, Tensor]], Tensor]) -> None:
    """An epoch of Accelerate over `data` with the script's own loss."""
    accelerator = loops.new_accelerator()
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=default_data_collator)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    for batch in loader:
        accelerator.backward(loss(model, batch))


def test_an_ordinary_run_has_no_kernel_of_the_guards(tmp_path: Path) -> None:
    before = kernels()
    loops.trainer(tmp_path).train()
    assert kernels() == before
    assert not guards.get("index-range").times


def test_a_refusal_names_every_part_and_leaves_the_device_as_it_was(tmp_path: Path) -> None:
    before = kernels()
    data = labelled(lambda number: 2 if number == 13 else number % 2)
    assert refusal(loops.trainer(tmp_path, data=data, train_sampling_strategy="sequential").train) == snapshot(
        "labels holds 2 in row 5 of a batch, and the model has 2 classes: Metal leaves such rows out of the loss; "
        "next: labels from 0 to 1 (num_labels= when the model is loaded), and -100 for what is to be left out; "
        "HF_MPS_GUARDS=-index-range trains all the same"
    )
    loops.trainer(tmp_path).train()
    assert kernels() == before


def test_another_ignore_index_is_no_label() -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], ignore_index=255)

    epoch(loops.bert(), labelled(lambda number: 255 if number % 3 == 0 else number % 2), loss)


def test_an_own_head_has_as_many_classes_as_it_likes() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = loops.bert().bert
            self.head = nn.Linear(16, 9)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.backbone(input_ids).pooler_output), labels)

    epoch(Own(), labelled(lambda number: number % 9), lambda model, batch: model(**batch))


def test_ids_that_the_model_maps_itself_are_its_own_affair() -> None:
    """As models of several modalities do with the ids of a picture's place."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loops.bert()

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return self.inner(input_ids=input_ids.where(input_ids < loops.WORDS, 0), labels=labels).loss

    data = [row | {"input_ids": [900, *row["input_ids"][1:]]} for row in loops.rows()]
    epoch(Placed(), data, lambda model, batch: model(**batch))


def test_what_a_script_maps_is_watched_for_a_while_and_then_no_longer() -> None:
    before = kernels()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"] - 1)

    data = labelled(lambda number: number % 2 + 1)
    epoch(loops.bert(), data, loss)
    assert kernels() != before
    epoch(loops.bert(), data * (LOOKS // 8), loss)  # more lookups than LOOKS: each of its batches has three and more
    assert kernels() == before


@pytest.mark.parametrize(
    ("problem", "label"),
    [("regression", lambda number: 4), ("multi_label_classification", lambda number: [0.0, 1.0])],
    ids=["scores", "several"],
)
def test_scores_and_several_labels_are_no_classes(problem: str, label: Any, tmp_path: Path) -> None:
    model = loops.bert(problem_type=problem, num_labels=1 if problem == "regression" else 2)
    data = labelled(lambda number: float(label(number)) if problem == "regression" else label(number))
    loops.trainer(tmp_path, model=model, data=data).train()
    assert not guards.get("index-range").times


def test_a_suspicion_that_no_lookup_meets_ends_too() -> None:
    """A model of sound has no lookup at all, and labels that are words of its own."""

    class Sound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loops.bert()
            self.head = nn.Linear(LENGTH, 1)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return (self.head(input_ids.float()).squeeze(1) - labels).square().mean()

    guard = guards.get("index-range")
    epoch(Sound(), labelled(lambda number: 30) * LOOKS, lambda model, batch: model(**batch))
    assert not guard._suspects  # type: ignore[attr-defined]
    assert not guard.times


def test_a_resized_embedding_has_its_new_rows(tmp_path: Path) -> None:
    model = loops.bert()
    data = [row | {"input_ids": [loops.WORDS + 3] * LENGTH} for row in loops.rows()]
    with pytest.raises(
        UserError, match="input_ids holds 43 in row 0 of a batch, and the model's embedding has 40 rows"
    ):
        loops.trainer(tmp_path, model=model, data=data).train()
    model.resize_token_embeddings(loops.WORDS + 4)
    loops.trainer(tmp_path, model=model, data=data).train()


def test_a_model_with_adapters_is_known_by_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    data = [row | {"input_ids": [50] * LENGTH} for row in loops.rows()]
    model = peft.get_peft_model(loops.bert(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2))
    with pytest.raises(UserError, match="input_ids holds 50"):
        loops.trainer(tmp_path, model=model, data=data).train()


def test_the_recipes_loss_in_chunks_is_a_loss_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=loops.WORDS, **sizes))
    deferred_head.install(model)
    data = [{"input_ids": row["input_ids"], "labels": [*row["input_ids"][:-1], 44]} for row in loops.rows()]
    with pytest.raises(UserError, match=r"labels holds 44 in row 0 .* 40 words"):
        loops.trainer(tmp_path, model=model, data=data).train()


def test_positions_behind_the_paddings_place_are_counted(tmp_path: Path) -> None:
    """RoBERTa's table of 8 is enough for 6 tokens, and not for 7."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=loops.WORDS, max_position_embeddings=LENGTH + 2, **sizes)
    data = [row | {"input_ids": [max(2, each) for each in row["input_ids"]]} for row in loops.rows()]
    loops.trainer(tmp_path, model=RobertaForSequenceClassification(config), data=data).train()
    longer = [row | {"input_ids": [*row["input_ids"], 5]} for row in data]
    with pytest.raises(UserError, match=r"7 tokens long, and the model has positions for 6: .*max_length=6"):
        loops.trainer(tmp_path, model=RobertaForSequenceClassification(config), data=longer).train()


def test_where_the_error_comes_late_the_guard_names_the_place(tmp_path: Path) -> None:
    data = labelled(lambda number: 3)
    with strictness.off("silent-indices"), strictness.on("late-indices"):
        with guards.suspended("index-range"), pytest.raises(torch.AcceleratorError, match="index 3 is out of bounds"):
            loops.trainer(tmp_path, data=data).train()
        # A trial of another guard was the first to wait: the error is the program's all the same.
        assert not [name for name in GUARDS.names if guards.get(name).broken]
        guards.get("index-range").forget()
        with pytest.raises(UserError, match="labels holds 3 in row 0 of a batch"):
            loops.trainer(tmp_path, data=data).train()


@pytest.mark.skipif(torch_release() >= (2, 14), reason="its late error is known by the release, without a trial")
def test_a_device_that_refuses_at_once_needs_no_guard(tmp_path: Path) -> None:
    with strictness.off("silent-indices"):
        assert not guards.get("index-range").applies().value
        with pytest.raises(IndexError, match="Target 3 is out of bounds"):
            loops.trainer(tmp_path, data=labelled(lambda number: 3)).train()
