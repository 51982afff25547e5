"""Dropout in kernels of ours draws as PyTorch's own does: from the generator's state, and without a launch for that."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_mps.metal import simulator
from hf_mps.metal.training_kernels import library, norms
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

SHAPE = (2, 3, 16, 16)
COUNT = math.prod(SHAPE)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="mps", requires_grad=True)


def attended() -> Tensor:
    """Chances that are all alike, but where dropout took them: a row of the values shows each key's."""
    values = torch.eye(SHAPE[-1], device="mps").repeat(*SHAPE[:2], 1, 1)
    query = torch.zeros(SHAPE, device="mps", requires_grad=True)
    return torch.nn.functional.scaled_dot_product_attention(query, query, values, dropout_p=0.5)


def normed() -> Tensor:
    weight = ones(SHAPE[-1])
    return norms.normed("layer_norm", 1e-5, ones(*SHAPE), weight, None, torch.zeros(SHAPE, device="mps"), 0.5)[0]


CALLS: dict[str, Callable[[], Tensor]] = {"attention": attended, "residual-norm": normed}


def mask(name: str) -> Tensor:
    """What was kept, on the host."""
    return CALLS[name]().detach().cpu() > 0


@pytest.mark.parametrize("name", CALLS)
def test_a_draw_costs_no_launch_and_no_wait(name: str, fused: Fused) -> None:
    with fused():
        CALLS[name]()
        with simulator.counted() as counts:
            CALLS[name]()
    launched = {each for each in counts.operators if each.startswith("metal::") or "random" in each}
    assert len(launched) == 1, launched
    assert counts.waits == 0


@pytest.mark.parametrize("seed", [3, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("offset", [0, 2**32 - 100, 2**40])
@pytest.mark.parametrize("name", CALLS)
def test_seed_and_offset_decide_and_the_offset_moves_by_the_numbers_drawn(
    name: str, offset: int, seed: int, fused: Fused
) -> None:
    generator = torch.mps._get_default_mps_generator()
    generator.manual_seed(seed).set_offset(offset)
    with fused():
        found = mask(name)
    assert generator.get_offset() == offset + COUNT
    signed = seed - 2**64 if seed >= 2**63 else seed
    assert torch.equal(found, library.kept((signed, offset), 0.5, SHAPE, torch.device("cpu")))


@pytest.mark.parametrize("name", CALLS)
def test_each_draw_is_another_and_a_saved_state_repeats_it(name: str, fused: Fused) -> None:
    with fused():
        torch.manual_seed(5)
        first, state = mask(name), torch.mps.get_rng_state()
        second = mask(name)
        torch.rand(3, device="mps")
        third = mask(name)
        torch.mps.set_rng_state(state)
        assert torch.equal(mask(name), second)
        torch.manual_seed(5)
        assert torch.equal(mask(name), first)
    for one, other in ((first, second), (second, third), (first, third)):
        assert 0.4 < float((one != other).float().mean()) < 0.6, "2 x 0.5 x 0.5 of them differ"


def test_without_dropout_nothing_is_drawn(fused: Fused) -> None:
    before = torch.mps.get_rng_state()
    with fused():
        query = ones(*SHAPE)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        norms.normed("layer_norm", 1e-5, query, ones(SHAPE[-1]), None, query)
    assert torch.equal(torch.mps.get_rng_state(), before)


def weights(folder: Path, fused: Fused, **how: Any) -> list[Tensor]:
    """A trained encoder's, whose attention and hidden states are dropped."""
    resumed = how.pop("resumed", None)
    model, rows = families.made("encoder")
    settings = {"max_steps": 6, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 1, **how}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, learning_rate=1e-2, **settings)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
    with fused(), simulator.counted() as counts:
        trainer.train(resume_from_checkpoint=resumed)
    assert counts.operators["metal::layer_norm_joined_float"] > 0
    assert not any("random" in each for each in counts.operators)
    return [each.detach().cpu() for each in model.parameters()]


def test_a_training_is_the_same_again_resumed_and_with_checkpointed_gradients(tmp_path: Path, fused: Fused) -> None:
    whole = weights(tmp_path, fused, save_strategy="steps", save_steps=3)
    resumed = weights(tmp_path, fused, resumed=str(tmp_path / "checkpoint-3"))
    again = weights(tmp_path / "again", fused, gradient_checkpointing=True)
    other = weights(tmp_path / "other", fused, seed=2)
    for found in (resumed, again):
        assert all(map(torch.equal, found, whole))
    assert not all(map(torch.equal, other, whole))
