"""A run whose weights step in the backward pass gives the numbers of any other, and says what it cannot go with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from safetensors.torch import load_file

from tests.finetune.run_files import results
from tests.finetune.tiny import Command, Stop

STEPS = ("training.max_steps=6", "training.logging_steps=1")


def history(run: Path) -> list[tuple[float, ...]]:
    """Loss, norm and learning rate of each step."""
    return [
        (each["loss"], each["grad_norm"], each["learning_rate"])
        for each in results(run)["log_history"]
        if "grad_norm" in each
    ]


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "model.safetensors")


@pytest.mark.rotated
@pytest.mark.parametrize(
    "words",
    [(), ("training.max_grad_norm=0",), ("training.max_grad_norm=0.01",), ("training.optim=adafactor",)],
    ids=["clipped", "not clipped", "clipped hard", "adafactor"],
)
def test_the_numbers_are_those_of_any_other_run(desk: Path, finetune: Command, words: tuple[str, ...]) -> None:
    # A fused step's rounding, which Adam makes a weight's in places, is not what is asked here.
    words = ("my.yaml", *STEPS, "fused_step=false", *words)
    assert finetune(*words, "output_dir=stock").code == 0
    assert finetune(*words, "step_in_backward=true", "output_dir=early").code == 0
    torch.testing.assert_close(history(desk / "early"), history(desk / "stock"), rtol=1e-6, atol=0)
    torch.testing.assert_close(weights(desk / "early"), weights(desk / "stock"), rtol=1e-5, atol=1e-7)


@pytest.mark.rotated
@pytest.mark.parametrize("words", [("step_in_backward=true",), ("weights=bfloat16",)], ids=lambda words: words[0])
def test_a_stopped_run_goes_on_to_the_same_end(
    desk: Path, finetune: Command, stop: Stop, words: tuple[str, ...]
) -> None:
    words = ("my.yaml", *STEPS, *words)
    assert finetune(*words, "output_dir=whole").code == 0
    stop(3)
    assert finetune(*words).code == 130
    assert finetune(*words).code == 0
    assert history(desk / "runs/my") == history(desk / "whole")
    torch.testing.assert_close(weights(desk / "runs/my"), weights(desk / "whole"), rtol=0, atol=0)


def test_weights_in_halves_are_loaded_trained_and_kept_as_halves(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", *STEPS, "weights=bfloat16", "training.learning_rate=1e-3").code == 0
    run = desk / "runs/my"
    assert {each.dtype for each in weights(run).values()} == {torch.bfloat16}
    assert json.loads((run / "config.json").read_text())["dtype"] == "bfloat16"
    said = results(run)["choices"]
    assert {name: said[name]["reason"] for name in ("weights", "step_in_backward")} == snapshot(
        {
            "weights": "the recipe says so: weights, gradients and moments take half; a step is rounded up or down by"
            " chance, so that small ones count",
            "step_in_backward": "weights are bfloat16: each weight steps when its gradient is there, which is then let"
            " go; clipping needs the norm of all gradients first, so forward and backward pass run twice"
            " (training.max_grad_norm=0 saves that)",
        }
    )
    assert all(loss == loss for loss, *_ in history(run))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("step_in_backward=true", "training.gradient_accumulation_steps=2"),
            snapshot(
                "hf-mps: step_in_backward is true, and training.gradient_accumulation_steps adds gradients up, which"
                " then all have to stay; leave one of them out\n"
            ),
        ),
        (
            ("weights=bfloat16", "training.optim=adafactor"),
            snapshot("hf-mps: weights is bfloat16, of which adafactor cannot step a part; leave one of them out\n"),
        ),
        (
            ("weights=bfloat16", "step_in_backward=false"),
            snapshot(
                "hf-mps: weights is bfloat16, whose weights step in the backward pass; leave step_in_backward out\n"
            ),
        ),
        (
            ("step_in_backward=true", "training.fp16=true"),
            snapshot(
                "hf-mps: step_in_backward is true, and training.fp16 looks for overflows in all gradients before any"
                " weight steps; leave one of them out\n"
            ),
        ),
    ],
    ids=["accumulation", "adafactor", "refused", "fp16"],
)
def test_what_does_not_go_together_is_one_line(
    desk: Path, finetune: Command, words: tuple[str, ...], line: str
) -> None:
    ended = finetune("my.yaml", *words)
    assert (ended.code, ended.err) == (2, line)
