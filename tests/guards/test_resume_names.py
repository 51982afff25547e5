"""A model whose weights have other names on the hub (ViT) goes on from its checkpoint, and ends with its best one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, ViTConfig
from transformers import ViTForImageClassification as ViT

from hf_mps import guards


@pytest.fixture(autouse=True)
def _other_names(tmp_path: Path) -> None:
    """Skips where transformers (5.0) saves a ViT under the names that it has in memory."""
    from safetensors import safe_open

    model = trainer(tmp_path / "names").model
    model.save_pretrained(tmp_path / "names")
    with safe_open(tmp_path / "names" / "model.safetensors", "pt") as saved:
        if set(saved.keys()) == set(model.state_dict()):
            pytest.skip("this transformers saves a ViT under the names that it has in memory")


class Noise(Dataset[dict[str, Any]]):
    """Eight images of noise with a class each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 8, 8, generator=drawn), "labels": index % 2}


def trainer(folder: Path, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    said = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "save_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**said | settings)
    return Trainer(
        ViT(ViTConfig(image_size=8, patch_size=4, **sizes)), arguments, train_dataset=Noise(), eval_dataset=Noise()
    )


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in run.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def resumed(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a whole run, and of one that went on from its first checkpoint."""
    whole, again = trainer(folder / "whole"), trainer(folder / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    return weights(whole), weights(again)


def test_without_the_guard_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    with guards.suspended("resume-names"):
        assert not equal(*resumed(tmp_path))


def test_with_it_a_resumed_run_ends_as_the_whole_one(tmp_path: Path) -> None:
    assert equal(*resumed(tmp_path))
    acted = next(each for each in guards.acted() if each["name"] == "resume-names")
    assert acted["times"] == 1
    assert acted["lines"] == [f"16 weights of {tmp_path}/whole/checkpoint-2 were found by their names on the hub"]


@pytest.mark.parametrize("on", [False, True])
def test_the_best_checkpoint_is_what_a_run_ends_with(tmp_path: Path, on: bool) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    run = trainer(tmp_path, **best, learning_rate=1.0, num_train_epochs=3)
    with nullcontext() if on else guards.suspended("resume-names"):
        run.train()
    kept = ViT.from_pretrained(run.state.best_model_checkpoint).state_dict()
    assert run.state.best_model_checkpoint != str(tmp_path / "checkpoint-6")
    assert equal(weights(run), kept) is on


def test_a_model_with_names_of_its_own_is_left_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, **sizes))
    model.save_pretrained(tmp_path / "checkpoint")
    run = Trainer(model, TrainingArguments(str(tmp_path), report_to="none"))
    run._load_from_checkpoint(str(tmp_path / "checkpoint"))
    assert "resume-names" not in [each["name"] for each in guards.acted()]
