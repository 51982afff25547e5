"""Rotations of Llama-type models: stock's numbers in fewer launches, in every model that rotates as Llama does."""

from __future__ import annotations

import importlib
import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from hf_mps.core.releases import torch_release
from hf_mps.layer.fused_step.decoder import DECODER_PIECES, ROTATION
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused
from tests.layer.fused_step.families import trained

pytestmark = pytest.mark.usefixtures("way")
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "mistral": (MistralForCausalLM, MistralConfig),
}


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": families.LENGTH}
    return kind(config(vocab_size=families.WORDS, **sizes, **families.SHAPE)).to("mps", dtype)


@pytest.mark.parametrize("frozen", [False, True], ids=["full", "norms frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_stocks_to_rounding(name: str, dtype: torch.dtype, frozen: bool, fused: Fused) -> None:
    made = model(name, dtype)
    for each, weight in made.named_parameters():
        weight.requires_grad_(not (frozen and "norm" in each))
    stock, loss, grads = trained(made, nullcontext())
    counts, found, ours = trained(made, fused())
    # Qwen3's stock launches less since 2.14.
    share = 0.9 if name == "qwen3" and torch_release() >= (2, 14) else 0.88
    assert counts.launches < share * stock.launches
    assert found == pytest.approx(loss, rel=1e-6 if dtype == torch.float32 else 1e-3)
    torch.testing.assert_close(ours, grads, rtol=1e-5, atol=1e-7 if dtype == torch.float32 else 2e-3)


def test_a_model_that_is_made_later_has_them_too(fused: Fused) -> None:
    with fused():
        made = model("mistral")
        assert DECODER_PIECES.words(made, "mps") == DECODER_PIECES.what
        counts, _, _ = trained(made, nullcontext())
    assert counts.launches < trained(made, nullcontext())[0].launches


def test_a_rotation_that_the_package_kernels_has_made_a_module_is_found(
    fused: Fused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `use_kernel_forward_from_hub` does so with functions (kernels/layer/layer.py, _create_func_module)."""
    stock = inspect.unwrap(modeling_mistral.apply_rotary_pos_emb)

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return stock(*args, **kwargs)

    monkeypatch.setattr(modeling_mistral, "apply_rotary_pos_emb", Func())
    stocks, loss, _ = trained(model("mistral"), nullcontext())
    with fused():
        fewer, found, _ = trained(model("mistral"), nullcontext())
        monkeypatch.setattr(modeling_mistral, "apply_rotary_pos_emb", stock)
        as_function, _, _ = trained(model("mistral"), nullcontext())
    assert found == pytest.approx(loss, rel=1e-6)
    assert fewer.launches == as_function.launches < stocks.launches


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("phi3", True),  # may rotate a part of the width, by other code
        ("nemotron", True),  # takes position_ids too
        ("cohere", False),  # neighbours in place of halves
        ("modernbert", False),  # in float32, whatever the dtype
        ("clvp", False),  # has values in it
    ],
)
def test_a_rotation_is_known_by_what_it_computes(name: str, copies: bool) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert DECODER_PIECES.is_copy(module.apply_rotary_pos_emb, ROTATION) is copies


def test_a_part_of_the_width_is_rotated_as_stock_does(fused: Fused) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    sizes = {"num_key_value_heads": 1, "max_position_embeddings": families.LENGTH, "rope_parameters": rope}
    made = Phi3ForCausalLM(Phi3Config(vocab_size=families.WORDS, pad_token_id=0, **sizes, **families.SHAPE)).to("mps")
    _, loss, grads = trained(made, nullcontext())
    _, found, ours = trained(made, fused())
    assert found == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(ours, grads, rtol=1e-5, atol=1e-7)


def rotated(given: Tensor) -> Tensor:
    cos, sin = (function(torch.arange(64, device="mps").view(2, 4, 8)) for function in (torch.cos, torch.sin))
    return modeling_llama.apply_rotary_pos_emb(given, given * 2, cos, sin)[0]


def test_a_rotation_by_the_kernel_is_one_launch_each_way(fused: Fused, way: str) -> None:
    given = torch.randn(2, 3, 4, 8, device="mps", requires_grad=True)
    cos, sin = (torch.randn(2, 4, 8, device="mps") for _ in range(2))
    upstream = torch.randn(2, 3, 4, 8, device="mps")
    with fused(), simulator.counted() as counts:
        first, second = modeling_llama.apply_rotary_pos_emb(given, given, cos, sin)
        torch.autograd.grad((first, second), given, (upstream, upstream))
    assert (counts.launches == 3) is (way == "kernel"), "the third adds the gradients of both"


def test_gradients_of_gradients_are_stocks(fused: Fused) -> None:
    torch.manual_seed(0)
    families.same_second_gradients(fused, rotated, torch.randn(2, 3, 4, 8, device="mps", requires_grad=True))
