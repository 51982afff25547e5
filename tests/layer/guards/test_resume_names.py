"""What resume-names says, and which models it leaves alone; that it helps is shown in experiments/resumed.py."""

from __future__ import annotations

from pathlib import Path

from inline_snapshot import snapshot
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_mps.layer import guards
from tests.layer.guards.experiments import resumed
from tests.snapshots import masked


def test_it_says_how_many_weights_of_which_checkpoint_were_found(tmp_path: Path) -> None:
    assert resumed.resumed_images(tmp_path)
    acted = next(each for each in guards.acted() if each["name"] == "resume-names")
    assert acted["times"] == 1
    assert [masked(line, folder=tmp_path) for line in acted["lines"]] == [
        snapshot("16 weights of <folder>/whole/checkpoint-2 were found by their names on the hub")
    ]


def test_a_model_with_names_of_its_own_is_left_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=8, **sizes))
    model.save_pretrained(tmp_path / "checkpoint")
    run = Trainer(model, TrainingArguments(str(tmp_path), report_to="none"))
    run._load_from_checkpoint(str(tmp_path / "checkpoint"))
    assert "resume-names" not in [each["name"] for each in guards.acted()]
