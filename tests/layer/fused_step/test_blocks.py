"""Blocks whose norms come first: the sums around a norm are its kernel's, and everything else is as stock has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel

from hf_mps.layer.fused_step.norms import BLOCKS, NORMS
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT, LLAMA, CLIP = BLOCKS


def llama() -> tuple[Any, dict[str, Tensor]]:
    ids = torch.arange(24).view(2, 12) % 50
    return LlamaModel(LlamaConfig(vocab_size=64, max_position_embeddings=16, **SIZE)), {"input_ids": ids}


def vit(dropout: float = 0.0) -> tuple[Any, dict[str, Tensor]]:
    config = ViTConfig(image_size=16, patch_size=8, hidden_dropout_prob=dropout, **SIZE)
    return ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)}


def clip() -> tuple[Any, dict[str, Tensor]]:
    config = CLIPTextConfig(vocab_size=64, max_position_embeddings=16, eos_token_id=63, **SIZE)
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    return CLIPTextModel(config), {"input_ids": torch.arange(24).view(2, 12) % 50, "attention_mask": mask}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {"Llama": llama, "ViT": vit, "CLIP": clip}


def made(name: str, **how: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model on the device that trains, whose norms have weights of all kinds, and a batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name](**how)
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() == 1:
                each.uniform_(-1, 1)
    return model.to("mps").train(), {key: value.to("mps") for key, value in batch.items()}


def step(model: Any, batch: dict[str, Tensor], context: AbstractContextManager[None]) -> tuple[list[Tensor], Any]:
    """The result and all gradients on the host, and what was counted."""
    model.zero_grad()
    with context, simulator.counted() as counts:
        found = model(**batch).last_hidden_state
        found.pow(3).sum().backward()
    of = [found.detach(), *(each.grad for each in model.parameters())]
    return [each.cpu() for each in of if each is not None], counts


def alike(found: list[Tensor], expected: list[Tensor]) -> None:
    """Within rounding of the largest gradient: some are zero but for that."""
    most = max(float(each.abs().max()) for each in expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * most)


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_stocks_without_sums_of_gradients(name: str, fused: Fused) -> None:
    model, batch = made(name)
    expected, plain = step(model, batch, nullcontext())
    found, counts = step(model, batch, fused())
    alike(found, expected)
    assert sum(times for each, times in counts.operators.items() if "norm_joined" in each) == 2, "one in each block"
    assert plain.operators["aten::add_.Tensor"] - counts.operators["aten::add_.Tensor"] >= 4, "two sums in each block"
    assert plain.operators["aten::add.Tensor"] - counts.operators["aten::add.Tensor"] >= 2
    assert not NORMS.broken


def test_a_hidden_states_gradient_is_whole(fused: Fused) -> None:
    """Whoever asks for the gradient of what goes from block to block gets that of all its uses."""
    model, batch = made("Llama")
    found = []
    for context in (nullcontext(), fused()):
        with context:
            states = model(**batch, output_hidden_states=True).hidden_states
            found.append([each.cpu() for each in torch.autograd.grad(states[-1].pow(3).sum(), states[:-1])])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_blocks_are_computed_again_and_are_the_same(name: str, fused: Fused) -> None:
    model, batch = made(name)
    expected, once = step(model, batch, fused())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, twice = step(model, batch, fused())
    assert all(map(torch.equal, found, expected))
    joined = next(each for each in once.operators if "norm_joined" in each)
    assert (once.operators[joined], twice.operators[joined]) == (2, 4)
    # The other way computes without gradients first, which is stock's.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    found, twice = step(model, batch, fused())
    alike(found, expected)
    assert twice.operators[joined] == 2


def test_dropout_before_a_residual_is_drawn_and_repeated(fused: Fused) -> None:
    model, batch = made("ViT", dropout=0.5)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(step(model, batch, fused())[0])
    torch.manual_seed(1)
    model.gradient_checkpointing_enable()
    again, _ = step(model, batch, fused())
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], again))
    assert not torch.equal(found[0][0], found[2][0])


def test_gradients_of_gradients_are_stocks(fused: Fused) -> None:
    model, batch = made("Llama")
    inputs = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    families.same_second_gradients(fused, lambda given: model(inputs_embeds=given).last_hidden_state, inputs)


@pytest.mark.parametrize("part", ["input_layernorm", "self_attn", "post_attention_layernorm"])
def test_a_part_that_somebody_looks_at_is_called_as_stock_calls_it(part: str, fused: Fused) -> None:
    model, batch = made("Llama")
    calls: list[tuple[int, list[str]]] = []
    for layer in model.layers:
        getattr(layer, part).register_forward_hook(
            lambda module, given, named, result: calls.append((len(given), sorted(named))), with_kwargs=True
        )
    expected, _ = step(model, batch, nullcontext())
    found, _ = step(model, batch, fused())
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    assert len(calls) == 4
    alike(found, expected)


def test_autocast_and_passes_without_gradients_are_stocks(fused: Fused) -> None:
    model, batch = made("Llama")
    with fused(), simulator.counted() as counts:
        with torch.autocast("mps", torch.float16):
            model(**batch)
        with torch.no_grad():
            model(**batch)
    assert not any("joined" in each for each in counts.operators)


COPIES = {
    "mistral.modeling_mistral:MistralDecoderLayer": LLAMA,
    "qwen2.modeling_qwen2:Qwen2DecoderLayer": LLAMA,
    "siglip.modeling_siglip:SiglipEncoderLayer": CLIP,
    "deit.modeling_deit:DeiTLayer": VIT,
    "gemma2.modeling_gemma2:Gemma2DecoderLayer": "",
    "bert.modeling_bert:BertLayer": "",
    "dinov2.modeling_dinov2:Dinov2Layer": "",
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_known_by_what_they_compute(name: str) -> None:
    module, _, kind = name.partition(":")
    found = getattr(import_module(f"transformers.models.{module}"), kind)
    assert [each for each in BLOCKS if NORMS.is_copy(found.forward, f"{each}.forward")] == [COPIES[name]] * bool(
        COPIES[name]
    )


@pytest.mark.parametrize("family", ["decoder with LoRA", "pictures"])
def test_the_header_says_so(family: str) -> None:
    model, _ = families.made(family)
    assert NORMS.words(model, "mps").endswith(", with the residual and dropout before it")
