"""A decoder's positions and rotations are made once; whatever makes them others has them made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_mps.layer.fused_step.decoder import FIXED_POSITIONS
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
}
Seen = list[tuple[torch.Tensor, torch.Tensor]]


def model(name: str = "llama", **said: Any) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": families.LENGTH}
    return kind(config(vocab_size=families.WORDS, **sizes, **families.SHAPE, **said)).to("mps").train()


def rotations(made: Any, *lengths: int, **how: Any) -> Seen:
    """The cosines and sines of forward passes over that many places each."""
    seen: Seen = []
    handle = made.model.rotary_emb.register_forward_hook(lambda module, given, out: seen.append(out))
    for length in lengths:
        made(input_ids=torch.ones(2, length, dtype=torch.long, device="mps"), **how)
    handle.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_they_are_stocks_and_made_once_for_each_length(name: str, fused: Fused) -> None:
    made = model(name)
    expected = rotations(made, 5, 7)
    with fused():
        assert FIXED_POSITIONS.words(made, "mps") == FIXED_POSITIONS.what
        found = rotations(made, 5, 7, 5, 7)
    for mine, theirs in zip(found, expected * 2, strict=True):
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(mine, theirs, strict=True))
    assert found[2][0] is found[0][0]
    assert found[3][1] is found[1][1]


def test_a_later_step_launches_less(fused: Fused) -> None:
    made, ids = model(), torch.ones(2, 5, dtype=torch.long, device="mps")
    with fused():
        first, second = simulator.Counted(), None
        made(input_ids=ids)
        first.stop()
        second = simulator.Counted()
        made(input_ids=ids)
        second.stop()
    assert first.launches - second.launches >= 8


def test_positions_of_a_batch_are_a_batchs(fused: Fused) -> None:
    made = model()
    given = torch.tensor([[3, 4, 5], [0, 1, 2]], device="mps")
    (expected,) = rotations(made, 3, position_ids=given)
    with fused():
        rotations(made, 3)
        (found,) = rotations(made, 3, position_ids=given)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True))


def changed_frequencies(made: Any, seen: Seen) -> None:
    made.model.rotary_emb.inv_freq.mul_(2)


def another_scaling(made: Any, seen: Seen) -> None:
    made.model.rotary_emb.attention_scaling = 2.0


def written_cosines(made: Any, seen: Seen) -> None:
    seen[0][0].zero_()


@pytest.mark.parametrize("change", [changed_frequencies, another_scaling, written_cosines])
def test_what_was_changed_is_made_anew(change: Any, fused: Fused) -> None:
    made = model()
    with fused():
        seen = rotations(made, 5)
        change(made, seen)
        (found,) = rotations(made, 5)
    (expected,) = rotations(made, 5)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True))


def test_a_rotation_that_depends_on_what_it_saw_is_made_each_time(fused: Fused) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    made = model(rope_parameters=rope)
    with fused():
        first, second = rotations(made, 5, 5)
    assert first[0] is not second[0]


def test_without_gradients_stock_runs(fused: Fused) -> None:
    made = model().eval()
    with fused(), torch.no_grad():
        first, second = rotations(made, 5, 5)
    assert first[0] is not second[0]
