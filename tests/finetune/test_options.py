"""Options of `training` that cannot work, or would do nothing: told in one line before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from left import results
from tiny import Command


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
            [
                "metric_for_best_model=f1",
                "lr_scheduler_type=reduce_lr_on_plateau",
                "lr_scheduler_kwargs={factor: 0.5}",
            ],
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
        (
            ["lr_scheduler_type=constant", "warmup_steps=3"],
            "training.warmup_steps does nothing with training.lr_scheduler_type=constant; constant_with_warmup has one",
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
        (
            ["optim=sgd", "optim_args=momentun=0.9"],
            "training.optim_args has momentun, which does nothing with training.optim=sgd",
        ),
        (["optim=sgd", "adam_beta1=0.8"], "training.adam_beta1 does nothing with training.optim=sgd; leave it out"),
        (["optim_target_modules=[query]"], "training.optim_target_modules does nothing with training.optim=adamw_torch"),
    ],
)
def test_what_cannot_be_is_told_before_the_training(
    desk: Path, finetune: Command, words: list[str], line: str
) -> None:
    ended = finetune("my.yaml", *(f"training.{word}" for word in words))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"hf-mps: {line}")
    assert ended.err.count("\n") == 1
    assert not (desk / "runs/my").exists()


def test_a_plan_refuses_them_too(desk: Path, finetune: Command) -> None:
    for word in ("optim=lomo", "metric_for_best_model=nope"):
        ended = finetune("my.yaml", "--plan", f"training.{word}")
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)


def test_early_stopping_by_a_number_that_is_not_measured_is_refused(desk: Path, finetune: Command) -> None:
    words = ("early_stopping_patience=1", "data.files.other=dev.csv", "data.files.train=train.csv")
    ended = finetune("my.yaml", *words, "training.metric_for_best_model=other_f1")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "hf-mps: training.metric_for_best_model is 'other_f1'; allowed: f1, accuracy, loss; other is measured once,"
        " after the training\n"
    )


def test_a_schedule_that_waits_for_a_score_waits_for_more_of_it(desk: Path, finetune: Command) -> None:
    words = ("lr_scheduler_type=reduce_lr_on_plateau", "metric_for_best_model=f1", "num_train_epochs=2")
    ended = finetune("my.yaml", *(f"training.{word}" for word in words))
    assert (ended.code, ended.err) == (0, "")
    import torch

    arguments = torch.load(desk / "runs/my/checkpoint-12/training_args.bin", weights_only=False)
    assert (arguments.lr_scheduler_kwargs, arguments.greater_is_better) == ({"mode": "max"}, True)


def test_an_error_rate_is_better_the_smaller_it_is(desk: Path) -> None:
    from hf_mps.finetune import best
    from hf_mps.finetune.metrics import chosen

    class Asked:
        metrics = chosen.choose(None, ("wer", "cer"), "speech-recognition")
        further: dict[str, object] = {}

    assert best.settle({"metric_for_best_model": "cer"}, Asked()) == ("cer", False)  # type: ignore[arg-type]
    assert best.settle({}, Asked()) == ("wer", False)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["optim=sgd training.optim_args=momentum=0.9,nesterov=true", "optim=adafactor"])
def test_what_can_be_trains(desk: Path, finetune: Command, word: str) -> None:
    ended = finetune("my.yaml", "training.max_steps=1", *f"training.{word}".split())
    assert (ended.code, ended.err) == (0, "")


def test_evaluation_sees_every_row_where_training_drops_the_last_batch(desk: Path, finetune: Command) -> None:
    # Batches of 32 in the evaluation: of 16 + 24 rows one would be left out, and every one of 16.
    assert finetune("my.yaml", "training.per_device_eval_batch_size=5", "output_dir=whole").code == 0
    words = ("training.per_device_eval_batch_size=5", "training.dataloader_drop_last=true")
    ended = finetune("my.yaml", *words)
    assert (ended.code, ended.err) == (0, "")
    assert results(desk / "runs/my")["metrics"] == results(desk / "whole")["metrics"]  # 48 rows are six whole batches
    assert (desk / "runs/my/predictions.csv").read_text() == (desk / "whole/predictions.csv").read_text()
