"""The faster precision is timed, chosen with its figures, kept for a run that goes on; the trial leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.choice import Choice
from hf_mps.finetune.cuda_graphs import precision
from hf_mps.finetune.cuda_graphs.graphs import Graphs, RecordingFailed
from hf_mps.finetune.cuda_graphs.precision import Trial
from hf_mps.finetune.features.precision import can_gain, skipped
from tests.finetune.cuda_graphs.recorders import Rerun, model, trainer
from tests.finetune.run_files import results
from tests.finetune.tiny import Command

CPU = torch.device("cpu")


def test_the_fastest_is_chosen_with_its_figures() -> None:
    trials = [Trial("bf16", 6.12, True), Trial("tf32", 8.4, True)]
    assert str(precision.decide(trials, "32 x 64")) == snapshot(
        "bf16 (measured: 6.1 ms forward and backward as a CUDA graph (32 x 64), tf32 8.4)"
    )
    slower = [Trial("bf16", 30.0, False), Trial("tf32", 21.0, False)]
    assert str(precision.decide(slower, "32 x 64")) == snapshot(
        "tf32 (measured: 21.0 ms forward and backward operator by operator (32 x 64), bf16 30.0)"
    )


def test_a_cpu_leaves_float32_for_a_gain_that_is_worth_it_alone() -> None:
    assert precision.decide([Trial("bf16", 50.0, False), Trial("fp32", 100.0, False)], "32 x 64").value == "bf16"
    kept = precision.decide([Trial("bf16", 90.0, False), Trial("fp32", 100.0, False)], "32 x 64")
    assert str(kept) == snapshot(
        "fp32 (measured: 100.0 ms forward and backward operator by operator (32 x 64), bf16 90.0)"
    )


@pytest.mark.parametrize(("supported", "gains"), [((), False), (("avx512_bf16",), True), (("amx_tile",), True)])
def test_a_cpu_that_does_not_multiply_bfloat16_is_not_asked(
    supported: tuple[str, ...], gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("avx512_bf16", "amx_tile"):
        answer = name in supported
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda answer=answer: answer, raising=False)
    assert can_gain("cpu") is gains
    assert can_gain("cuda")
    assert not can_gain("mps")


class Prepared:
    """What the trial asks of a task."""

    def __init__(self, made: Any, kind: Any = None) -> None:
        self.model, self.trainer = made, kind


@pytest.mark.parametrize(
    ("training", "steps", "why"),
    [
        ({}, 5000, snapshot("")),
        ({}, 20, snapshot("20 steps are too few to repay a trial of others")),
        ({"bf16": False}, 5000, snapshot("training.bf16 in the recipe")),
        ({"fp16": True}, 5000, snapshot("training.fp16 in the recipe")),
        ({"tf32": False}, 5000, snapshot("training.tf32 in the recipe")),
    ],
)
def test_the_users_word_wins_and_a_short_run_is_not_timed(training: dict[str, Any], steps: int, why: str) -> None:
    assert skipped(training, Prepared(model()), steps, "cuda") == why  # type: ignore[arg-type]


def test_what_a_trial_would_not_measure_is_not_timed() -> None:
    from hf_mps.finetune.models.preference_trainer import PairTrainer

    own = skipped({}, Prepared(model(), PairTrainer), 5000, "cuda")  # type: ignore[arg-type]
    assert own == snapshot("the task's trainer computes its own loss")
    half = skipped({}, Prepared(model().bfloat16()), 5000, "cuda")  # type: ignore[arg-type]
    assert half == snapshot("the model's weights are not float32")


def network() -> Any:
    """A ResNet with batch normalisation, whose buffers a forward pass changes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config)


def draws() -> tuple[Any, ...]:
    return random.random(), float(numpy.random.rand()), torch.rand(3).tolist()


@pytest.mark.parametrize("recorder", [None, Rerun])
def test_a_trial_leaves_no_trace(recorder: Any) -> None:
    made = network().eval()
    batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    before = {name: value.clone() for name, value in made.state_dict().items()}
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    expected = draws()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)

    graphs = (lambda: Graphs(recorder())) if recorder else None
    trials = precision.measure(made, batch, graphs=graphs, device=CPU)

    assert [(one.name, one.recorded, one.ms > 0) for one in trials] == [
        ("bf16", recorder is not None, True),
        ("fp32", recorder is not None, True),
    ]
    assert draws() == expected
    assert not made.training
    assert all(parameter.grad is None for parameter in made.parameters())
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_step_that_cannot_be_recorded_is_left_as_it_was_too() -> None:
    def fails(body: Any) -> Any:
        body()
        raise RecordingFailed("no")

    made = network()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    with pytest.raises(RecordingFailed):
        precision.measure(made, batch, graphs=lambda: Graphs(fails), device=CPU)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_the_same_recipe_trains_in_the_same_precision_whatever_the_clock_says_next(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([(50.0, 100.0), (100.0, 50.0)])

    def timed(*_: Any, **__: Any) -> list[Trial]:
        bf16, fp32 = next(clock)
        return [Trial("bf16", bf16, False), Trial("fp32", fp32, False)]

    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    monkeypatch.setattr("hf_mps.finetune.features.precision.can_gain", lambda device: True)
    monkeypatch.setattr(precision, "measure", timed)
    monkeypatch.setattr("hf_mps.finetune.features.precision.WORTH_STEPS", {"cpu": 1})
    for folder in ("first", "second"):
        ended = finetune("my.yaml", "training.max_steps=2", f"output_dir={folder}")
        assert ended.code == 0, ended.err
    said, again = (results(desk / folder)["choices"]["precision"] for folder in ("first", "second"))
    assert said["value"] == again["value"] == "bf16"
    kept = "; kept for this machine and model; to measure again, remove "
    assert again["reason"].partition(kept)[0] == said["reason"]
    Path(again["reason"].partition(kept)[2]).expanduser().unlink()
    assert finetune("my.yaml", "training.max_steps=2", "output_dir=third").code == 0
    assert results(desk / "third")["choices"]["precision"]["value"] == "fp32", "the clock was asked again"


def test_a_run_that_goes_on_finds_what_was_measured(tmp_path: Path) -> None:
    begun = trainer(tmp_path, save_strategy="steps", save_steps=9)
    begun.add_callback(precision.MeasuredPrecision("tf32", "measured"))
    begun.train()
    assert precision.stored(tmp_path / "checkpoint-9") == Choice("tf32", "measured")
    on = trainer(tmp_path, save_strategy="steps", save_steps=9, num_train_epochs=4)
    on.add_callback(precision.MeasuredPrecision("tf32", "measured"))
    on.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert precision.stored(tmp_path / "checkpoint-18") == Choice("tf32", "measured")


def test_a_run_that_measured_nothing_goes_on_as_it_began(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=18).train()
    assert precision.stored(tmp_path / "checkpoint-18") is None


def test_what_a_trial_takes_counts_once(tmp_path: Path) -> None:
    """It is part of the training's seconds, and of no run that goes on from a checkpoint."""
    from hf_mps.finetune.run.callbacks import Stopwatch

    watch, on = Stopwatch(), Stopwatch()
    watch.before, on.before = 1000.0, 50_000.0
    begun = trainer(tmp_path, save_strategy="steps", save_steps=9)
    begun.add_callback(watch)
    begun.train()
    assert 1000 < watch.seconds < 2000
    again = trainer(tmp_path)
    again.add_callback(on)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert 1000 < on.seconds < 2000
