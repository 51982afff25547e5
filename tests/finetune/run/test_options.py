"""Options of `training` that cannot work, or would do nothing: told in one line before anything trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.finetune.features.arguments import best_metric
from hf_mps.finetune.features.machine import OneGpu
from hf_mps.metrics import selection
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command, Ended
from tests.snapshots import masked


def trained(ended: Ended) -> bool:
    """Whether a run came as far as its header, which stands before the first step."""
    return "hf_mps finetune" in ended.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["metric_for_best_model=acuracy"],
            "training.metric_for_best_model is 'acuracy'; allowed: f1, accuracy, loss; did you mean 'accuracy'?",
        ),
        (
            ["metric_for_best_model=eval_f", "load_best_model_at_end=true"],
            "training.metric_for_best_model is 'eval_f'; allowed: f1, accuracy, loss",
        ),
        (
            ["metric_for_best_model=f1", "greater_is_better=false"],
            "training.greater_is_better is false, and f1 is better the greater it is; leave it out",
        ),
        (
            ["metric_for_best_model=eval_loss", "greater_is_better=true"],
            "training.greater_is_better is true, and loss is better the smaller it is; leave it out",
        ),
        (
            ["metric_for_best_model=f1", "lr_scheduler_type=reduce_lr_on_plateau", "lr_scheduler_kwargs={factor: 0.5}"],
            "training.lr_scheduler_kwargs has no mode (PyTorch takes min), and f1 is better the greater it is;"
            " allowed: mode: max",
        ),
        (
            ["lr_scheduler_type=cosine_with_min_lr"],
            "training.lr_scheduler_type=cosine_with_min_lr: refused: One of min_lr or min_lr_rate should be set"
            " through the `lr_scheduler_kwargs`",
        ),
        (
            ["lr_scheduler_type=cosine", "lr_scheduler_kwargs={nope: 1}"],
            "training.lr_scheduler_type=cosine with lr_scheduler_kwargs {'nope': 1}: refused:"
            " get_cosine_schedule_with_warmup() got an unexpected keyword argument 'nope'",
        ),
        (
            ["lr_scheduler_type=cosine", "lr_scheduler_kwargs={num_cycles: many}"],
            "training.lr_scheduler_type=cosine with lr_scheduler_kwargs {'num_cycles': 'many'}: refused: ",
        ),
        (["optim=galore_adamw"], "training.optim=galore_adamw: refused: You need to install `galore_torch`"),
        (["optim=apollo_adamw_layerwise"], "training.optim=apollo_adamw_layerwise: refused: You need to install"),
        (["optim=lomo"], "training.optim=lomo: refused: You need to install `lomo_optim`"),
        (["optim=schedule_free_adamw"], "training.optim=schedule_free_adamw: refused: You need to install"),
        (["optim=grokadamw"], "training.optim=grokadamw: refused: "),
        (["optim=sgd", "optim_args=momentum"], "training.optim_args is 'momentum'; allowed: KEY=VALUE,KEY=VALUE"),
        (
            ["optim=sgd", "optim_args=momentum=big"],
            "training.optim=sgd training.optim_args=momentum=big: refused: could not convert string to float: 'big'",
        ),
        (["learning_rate="], "command line: training.learning_rate is empty; allowed: a number"),
        (["learning_rate=null"], "command line: training.learning_rate is empty; allowed: a number"),
        (
            ["dataloader_drop_last=true", "per_device_train_batch_size=64"],
            "training.dataloader_drop_last leaves nothing to train on: 48 rows make no batch of 64; leave it out",
        ),
    ],
)
def test_what_cannot_be_is_told_before_the_training(desk: Path, finetune: Command, words: list[str], line: str) -> None:
    ended = finetune("my.yaml", *(f"training.{word}" for word in words))
    assert (ended.code, trained(ended)) == (2, False)
    assert ended.err.startswith(f"hf-mps: {line}")
    assert ended.err.count("\n") == 1
    assert not (desk / "runs/my").exists()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("fallback=[aten::nope]", "fallback has 'aten::nope', which is not an operator of PyTorch 2."),
        ("fallback=[aten::add.Tensr]", "fallback has 'aten::add.Tensr', which is not an operator of PyTorch 2."),
        ("model_type=gpt2", "model_type is gpt2, and model holds a bert; leave model_type out"),
        ("config_overrides.num_hidden_layers=-1", "config_overrides.num_hidden_layers is -1; allowed: an integer of 1"),
        ("config_overrides.num_attention_heads=0", "config_overrides.num_attention_heads is 0; allowed: an integer of"),
        ("config_overrides.hidden_size=big", "config_overrides.hidden_size is 'big'; allowed: a number"),
        ("config_overrides.hidden_dropout_prob=7", "config_overrides.hidden_dropout_prob is 7; allowed: 0 to 1"),
        ("config_overrides.hidden_act=3", "config_overrides.hidden_act is 3; allowed: text"),
        ("output_dir=''", "command line: output_dir is ''; allowed: a folder for this run alone, such as runs/mine"),
        ("output_dir=/", "command line: output_dir is '/'; allowed: a folder for this run alone, such as runs/mine"),
        ("output_dir=.", "command line: output_dir is '.'; allowed: a folder for this run alone, such as runs/mine"),
        (f"output_dir={'x' * 300}", "command line: output_dir has a name of more than 255 bytes, which no disk takes"),
        (
            f"seed={'1' * 5000}",
            "command line: seed: '1111111111…' is not valid YAML: an integer of 5,000 digits; allowed",
        ),
        (
            f"data={'[' * 900}{']' * 900}",
            "command line: data: '[[[[[[[[[[…' is not valid YAML: values more than 20 deep",
        ),
        (
            f"{'a.' * 900}a=1",
            "command line: 'a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.…' has 900 dots; allowed: up to 20",
        ),
        ("seed=!!python/object:os.system x", "command line: seed: "),
        ('model="a\\0b"', "command line: model: "),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(desk: Path, finetune: Command, word: str, line: str) -> None:
    ended = finetune("my.yaml", word)
    assert (ended.code, trained(ended)) == (2, False)
    assert ended.err.startswith(f"hf-mps: {line}")
    assert ended.err.count("\n") == 1
    assert len(ended.err) < 400
    assert not list(desk.rglob("results.json"))


@pytest.mark.parametrize("content", ["a: " * 40 + "1", f"seed: {'9' * 5000}", "seed: &x [*x]", "x: " + "{y: " * 900])
def test_a_recipe_file_that_no_reader_ends_well_on_is_refused(desk: Path, finetune: Command, content: str) -> None:
    (desk / "my.yaml").write_text(content, encoding="utf-8")
    ended = finetune("my.yaml")
    assert (ended.code, trained(ended)) == (2, False)
    assert ended.err.startswith("hf-mps: my.yaml:1: is not valid YAML: ")
    assert ended.err.count("\n") == 1


def test_a_cache_that_cannot_be_made_is_named(desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(desk / "my.yaml" / "cache"))
    ended = finetune("my.yaml")
    assert (ended.code, trained(ended)) == (2, False)
    assert masked(ended.err, desk=desk) == snapshot(
        "hf-mps: HF_HOME is <desk>/my.yaml/cache, which cannot be made: Not a directory; allowed: a folder"
        " that can be written\n"
    )


@pytest.mark.parametrize("option", ["eval_strategy=no", "save_strategy=no", "load_best_model_at_end=false"])
@pytest.mark.usefixtures("desk")
def test_early_stopping_that_could_not_work_is_refused(finetune: Command, option: str) -> None:
    assert finetune("my.yaml", "early_stopping_patience=2", f"training.{option}").refused() == (
        "early_stopping_patience: it compares evaluations and keeps the best checkpoint, and"
        f" training.{option}; leave one of them out"
    )


def test_early_stopping_by_a_number_that_is_not_measured_is_refused(desk: Path, finetune: Command) -> None:
    words = ("early_stopping_patience=1", "data.files.other=dev.csv", "data.files.train=train.csv")
    ended = finetune("my.yaml", *words, "training.metric_for_best_model=other_f1")
    assert (ended.code, trained(ended)) == (2, False)
    assert ended.err == snapshot(
        "hf-mps: training.metric_for_best_model is 'other_f1'; allowed: f1, accuracy, loss; other is measured once,"
        " after the training\n"
    )


def test_a_schedule_that_waits_for_a_score_waits_for_more_of_it(desk: Path, finetune: Command) -> None:
    words = ("lr_scheduler_type=reduce_lr_on_plateau", "metric_for_best_model=f1", "num_train_epochs=2")
    finetune("my.yaml", *(f"training.{word}" for word in words)).finished()
    arguments = torch.load(desk / "runs/my/checkpoint-12/training_args.bin", weights_only=False)
    assert (arguments.lr_scheduler_kwargs, arguments.greater_is_better) == ({"mode": "max"}, True)


def test_an_error_rate_is_better_the_smaller_it_is(desk: Path) -> None:
    asked: Any = SimpleNamespace(metrics=selection.choose(None, ("wer", "cer"), "speech-recognition"), further={})
    assert best_metric({"metric_for_best_model": "cer"}, asked) == ("cer", False)
    assert best_metric({}, asked) == ("wer", False)


@pytest.mark.parametrize("word", ["optim=sgd training.optim_args=momentum=0.9,nesterov=true", "optim=adafactor"])
def test_what_can_be_trains(desk: Path, finetune: Command, word: str) -> None:
    finetune("my.yaml", "training.max_steps=1", *f"training.{word}".split()).finished()


@pytest.mark.parametrize("word", ["dataloader_drop_last=true", "train_sampling_strategy=group_by_length"])
def test_evaluation_sees_every_row_in_its_order_however_training_draws(
    desk: Path, finetune: Command, word: str
) -> None:
    # 16 rows of several lengths in batches of 5: one would be left out.
    rows = tiny.rows(16)
    for place, row in enumerate(rows):
        row["first"] += " and it was good" * (place % 4)
    tiny.write_csv(desk / "dev.csv", rows)
    words = (f"training.{word}", "training.per_device_eval_batch_size=5", "training.max_steps=2")
    finetune("my.yaml", *words).finished()
    answers = predictions(desk / "runs/my")
    assert [(row["text"], row["label"]) for row in answers] == [(row["first"], str(row["label"])) for row in rows]
    right = [row["label"] == row["prediction"] for row in answers]
    assert results(desk / "runs/my")["metrics"]["accuracy"] == sum(right) / 16


def test_a_process_by_itself_trains_on_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:

    def gpus(device: str) -> dict[str, Any]:
        draft: Any = SimpleNamespace(device=device, choices={})
        OneGpu().decide(draft)
        return dict(draft.choices)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert {name: str(choice) for name, choice in gpus("cuda").items()} == snapshot(
        {
            "gpus": "1 of 2 (the first, CUDA_VISIBLE_DEVICES names another; torchrun --nproc_per_node 2 -m"
            " hf_mps.finetune … trains on all)"
        }
    )
    assert gpus("mps") == {}
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert gpus("cuda") == {}
