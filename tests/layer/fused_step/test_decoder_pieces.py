"""Norms and rotations of Llama-type models: stock's numbers in fewer launches, in every model with Llama's code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_mps.layer.fused_step.decoder_pieces import DECODER_PIECES
from hf_mps.metal import simulator
from tests.layer.fused_step import families

Fused = Callable[[], AbstractContextManager[None]]
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


def trained(model: Any, context: AbstractContextManager[None], **how: Any) -> tuple[int, float, dict[str, Tensor]]:
    """The launches of a forward and a backward pass, the loss, and the gradients on the host."""
    ids = torch.arange(2 * families.LENGTH, device="mps").view(2, -1) % families.WORDS
    model.zero_grad()
    with context, simulator.counted() as counts:
        loss = model(input_ids=ids, labels=ids, **how).loss
        loss.backward()
    grads = {name: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None}
    return counts.launches, loss.item(), grads


@pytest.mark.parametrize("frozen", [False, True], ids=["full", "norms frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_stocks_to_rounding(name: str, dtype: torch.dtype, frozen: bool, fused: Fused) -> None:
    made = model(name, dtype)
    for each, weight in made.named_parameters():
        weight.requires_grad_(not (frozen and "norm" in each))
    launches, loss, grads = trained(made, nullcontext())
    fewer, found, ours = trained(made, fused())
    assert fewer < 0.85 * launches
    assert found == pytest.approx(loss, rel=1e-6 if dtype == torch.float32 else 1e-3)
    assert ours.keys() == grads.keys()
    for each, expected in grads.items():
        torch.testing.assert_close(ours[each], expected, rtol=1e-5, atol=1e-7 if dtype == torch.float32 else 1e-3)


def test_t5s_norm_is_the_same_formula(fused: Fused) -> None:
    from transformers.models.mt5.modeling_mt5 import MT5LayerNorm

    found = []
    for context in (nullcontext(), fused()):
        torch.manual_seed(0)
        norm, given = MT5LayerNorm(8).to("mps"), torch.randn(3, 8, device="mps", requires_grad=True)
        with context, simulator.counted() as counts:
            result = norm(given)
            result.square().sum().backward()
        assert given.grad is not None
        found.append((counts.launches, result.detach().cpu(), given.grad.cpu(), norm.weight.grad.cpu()))
    assert found[1][0] < found[0][0]
    for mine, theirs in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_that_is_made_later_has_them_too(fused: Fused) -> None:
    with fused():
        made = model("mistral")
        assert DECODER_PIECES.words(made, "mps") == DECODER_PIECES.what
        launches, _, _ = trained(made, nullcontext())
    assert launches < trained(made, nullcontext())[0]


def test_other_code_keeps_its_own_way(fused: Fused) -> None:
    """Gemma's norm has a word more: one is added to its weight."""
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": families.LENGTH}
    made = GemmaForCausalLM(GemmaConfig(vocab_size=families.WORDS, **sizes, **families.SHAPE))
    with fused():
        assert not hasattr(type(made.model.norm).forward, "hf_mps_patches")
        assert DECODER_PIECES.words(made, "mps") == ""


def test_the_norms_gradients_are_those_of_double_precision(fused: Fused) -> None:
    norm = LlamaRMSNorm(8)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    double, hidden = copy.deepcopy(norm).double(), torch.randn(3, 5, 8)
    exact = hidden.double().requires_grad_()
    # Llama's own rounds to float32 within; this is its formula.
    result = double.weight * exact / (exact.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    result.square().sum().backward()
    there = hidden.to("mps").requires_grad_()
    norm.to("mps")
    with fused():
        norm(there).square().sum().backward()
    assert there.grad is not None
    torch.testing.assert_close(there.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad.cpu().double(), double.weight.grad, rtol=1e-5, atol=1e-5)


def second_gradients(context: AbstractContextManager[None], call: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    given = torch.randn(2, 3, 4, 8, device="mps", requires_grad=True)
    with context:
        (first,) = torch.autograd.grad(call(given).pow(3).sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
    return second.cpu()


def rotated(given: Tensor) -> Tensor:
    cos, sin = (function(torch.arange(64, device="mps").view(2, 4, 8)) for function in (torch.cos, torch.sin))
    return modeling_llama.apply_rotary_pos_emb(given, given * 2, cos, sin)[0]


@pytest.mark.parametrize("name", ["norm", "rotation"])
def test_gradients_of_gradients_are_stocks(name: str, fused: Fused) -> None:
    call = LlamaRMSNorm(8).to("mps") if name == "norm" else rotated
    expected = second_gradients(nullcontext(), call)
    torch.testing.assert_close(second_gradients(fused(), call), expected, rtol=1e-4, atol=1e-3)


def test_without_gradients_and_on_the_host_stock_runs(fused: Fused) -> None:
    norm = LlamaRMSNorm(8)
    with fused():
        assert "Norm" not in type(norm(torch.ones(2, 8, requires_grad=True)).grad_fn).__name__
        with torch.no_grad(), simulator.counted() as counts:
            norm.to("mps")(torch.ones(2, 8, device="mps"))
    assert counts.launches == 7, "Llama's six, and the ones"
