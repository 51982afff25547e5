"""What a step of each family of models launches, copies and waits for, fused and as the plain Trainer has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_mps.core.releases import torch_release
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

# Counted from macOS 15 on: on macOS 14 each tensor of a batch is a copy, and MPSGraph gets copies of permuted tensors.
STEPS, PLAIN_STEPS, MINILM_STEPS = 32, 4, 4
COLUMN = sum(torch_release() >= release for release in ((2, 14), (2, 15)))
# What is left of the plain Trainer's dispatches and graphs, of models with two layers, with torch 2.13, 2.14 and 2.15.
# From 2.14 on a linear layer sums for its bias in a dispatch by itself; 2.15 drops in one by itself, so that the plain
# Trainer has fewer. The figures of 2.14 are 2.13's calls counted by 2.14.1's rules.
SHARES = {
    "encoder": (0.29, 0.28, 0.29),
    "decoder with LoRA": (0.33, 0.32, 0.34),
    "decoder with LoRA, nothing dropped": (0.30, 0.30, 0.31),
    "pictures": (0.30, 0.28, 0.28),
    "translation": (0.53, 0.51, 0.54),
    "embeddings": (0.43, 0.41, 0.45),
}
# Launches of a step of MiniLM, six layers; two of them are the sentinel stopped-gpu's, before torch 2.15.
OF_MINILM, OF_PLAIN_MINILM = ((201, 808), (222, 951), (220, 909))[COLUMN]


@pytest.mark.macos(15)
@pytest.mark.rotated
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_step_launches_less_copies_once_and_waits_for_nothing(name: str, tmp_path: Path, fused: Fused) -> None:
    plain = families.train(families.made(name), tmp_path, steps=PLAIN_STEPS).counted
    with fused():
        found = families.train(families.made(name), tmp_path, steps=STEPS).counted
    assert found.launches / STEPS <= SHARES[name][COLUMN] * plain.launches / PLAIN_STEPS
    assert found.blits / STEPS < plain.blits / PLAIN_STEPS + 1  # a gradient that comes anew is brought to the others
    assert found.figures.encoders / STEPS < plain.figures.encoders / PLAIN_STEPS
    assert found.copies_in == STEPS
    assert plain.copies_in / PLAIN_STEPS == len(families.made(name)[1][0])
    assert found.waits <= 2


def of_minilm(folder: Path) -> families.Made:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    _, rows = families.made("encoder")
    return model, [row | {"token_type_ids": [0] * families.LENGTH} for row in rows]


@pytest.mark.macos(15)
@pytest.mark.slow
@pytest.mark.rotated("/")
def test_a_step_of_minilm(minilm: Path, tmp_path: Path, fused: Fused) -> None:
    plain = families.train(of_minilm(minilm), tmp_path, steps=2).counted
    with fused():
        found = families.train(of_minilm(minilm), tmp_path, steps=MINILM_STEPS).counted
    assert plain.launches / 2 == OF_PLAIN_MINILM
    assert found.launches / MINILM_STEPS <= OF_MINILM
    assert (found.copies_in, found.waits <= 2) == (MINILM_STEPS, True)


@pytest.mark.rotated
@pytest.mark.parametrize("name", ["encoder", "decoder with LoRA", "decoder with LoRA, nothing dropped", "pictures"])
def test_losses_of_50_steps_are_the_plain_trainers(name: str, tmp_path: Path, fused: Fused) -> None:
    """The simulated device draws the same masks for dropout in pieces and in one kernel, but in kernels of ours."""
    how = {"steps": 50 - families.WARM - 1, "logging_steps": 1, "learning_rate": 1e-3}
    undropped = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0} if name == "encoder" else {}
    expected = families.train(families.made(name, **undropped), tmp_path, **how).losses
    with fused():
        found = families.train(families.made(name, **undropped), tmp_path, **how).losses
    assert len(found) == 50
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
