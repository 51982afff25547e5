"""Activations by kernels: stock's numbers in fewer launches, in what BERT, ViT, Llama and GPT-2 write and their kin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.activations import ACT2FN

from hf_mps.core.releases import torch_release
from hf_mps.layer.fused_step.activations import ACTIVATION, ACTIVATIONS
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

WIDE, NARROW = 24, 16
SHAPE = {"hidden_size": NARROW, "intermediate_size": WIDE, "num_hidden_layers": 1, "num_attention_heads": 1}
PICTURES = {"image_size": 8, "patch_size": 8}


def made(kind: str, config: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


# The gradient of SiLU and of a product's two factors: PyTorch's own kernels since 2.14.
GATED = 7 if torch_release() < (2, 14) else 5
# What of a model has the activation, the kernel that takes it, and the launches that this saves.
LAYERS: dict[str, tuple[Callable[[], Any], str, int]] = {
    "llama": (lambda: made("LlamaModel", "LlamaConfig", **SHAPE).layers[0].mlp, "gated_silu", GATED),
    "qwen3": (lambda: made("Qwen3Model", "Qwen3Config", **SHAPE).layers[0].mlp, "gated_silu", GATED),
    "gemma": (lambda: made("GemmaModel", "GemmaConfig", **SHAPE).layers[0].mlp, "gated_tanh", GATED),
    "bert": (lambda: made("BertModel", "BertConfig", **SHAPE).encoder.layer[0].intermediate, "forward_gelu", 0),
    "vit": (lambda: made("ViTModel", "ViTConfig", **SHAPE, **PICTURES).layers[0].mlp, "forward_gelu", 0),
    "clip": (
        lambda: made("CLIPVisionModel", "CLIPVisionConfig", **SHAPE, **PICTURES).encoder.layers[0].mlp,
        "forward_quick",
        6,
    ),
    "gpt2": (
        lambda: made("GPT2Model", "GPT2Config", n_embd=NARROW, n_head=1, n_layer=1, resid_pdrop=0.0).h[0].mlp,
        "forward_tanh",
        17,
    ),
    "fast": (lambda: ACT2FN["gelu_fast"], "forward_tanh", 20),
}


def layer(name: str, dtype: torch.dtype = torch.float32) -> Any:
    found = LAYERS[name][0]().to("mps", dtype)
    with torch.no_grad():
        for each in found.parameters():
            each.normal_(std=0.3)
    return found


def through(module: Any, context: AbstractContextManager[Any], dtype: torch.dtype = torch.float32) -> Any:
    """The result and the gradients on the host, and what was launched for them."""
    draw = torch.Generator().manual_seed(1)
    given = torch.randn(3, 5, NARROW, generator=draw).to("mps", dtype).requires_grad_()
    module.zero_grad()
    upstream = torch.randn(module(given.detach()).shape, generator=draw).to("mps", dtype)
    with context, simulator.counted() as counts:
        found = module(given)
        found.backward(upstream.to(found.dtype))
    of = [found.detach(), given.grad, *(each.grad for each in module.parameters())]
    return [each.float().cpu() for each in of if each is not None], counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_stocks_by_a_kernel_each_way(name: str, dtype: torch.dtype, fused: Fused) -> None:
    module = layer(name, dtype)
    expected, stock = through(module, nullcontext(), dtype)
    found, ours = through(module, fused(), dtype)
    for mine, theirs in zip(found, expected, strict=True):
        apart = (mine - theirs).abs().max() / theirs.abs().max()
        assert float(apart) <= (2e-6 if dtype == torch.float32 else 0.04)  # bfloat16 has three digits
    kernels = {each for each in ours.operators if each.startswith("metal::")}
    assert len(kernels) == 2
    assert any(LAYERS[name][1] in each for each in kernels)
    assert ours.launches <= stock.launches - LAYERS[name][2]


def test_layers_with_adapters_are_called_as_they_are(fused: Fused) -> None:
    from peft import LoraConfig, get_peft_model

    model = made("LlamaForCausalLM", "LlamaConfig", vocab_size=64, **SHAPE)
    targets = ["gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False))
    module = adapted.base_model.model.model.layers[0].mlp.to("mps")
    expected, stock = through(module, nullcontext())
    found, ours = through(module, fused())
    assert ours.launches <= stock.launches - GATED - 3
    assert len(found) == 2 + 2 * len(targets)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_under_autocast_they_are_stocks_too(name: str, fused: Fused) -> None:
    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer(name)

        def forward(self, given: Tensor) -> Tensor:
            with torch.autocast("mps", torch.bfloat16):
                found: Tensor = self.inner(given)
            return found

    module = Cast()
    expected, stock = through(module, nullcontext())
    found, ours = through(module, fused())
    assert ours.launches <= stock.launches
    assert any(each.startswith("metal::") and each.endswith("_bfloat") for each in ours.operators)
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < 0.04


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_gradients_are_stocks(name: str, fused: Fused) -> None:
    module = layer(name)
    given = torch.randn(3, NARROW, generator=torch.Generator().manual_seed(1)).to("mps").requires_grad_()
    families.same_second_gradients(fused, module, given, wanted=module.parameters(), tolerance=1e-4)


@pytest.mark.parametrize(("name", "part"), [("llama", "act_fn"), ("bert", "intermediate_act_fn"), ("bert", "dense")])
def test_who_waits_for_the_call_of_a_part_gets_it(name: str, part: str, fused: Fused) -> None:
    module, seen = layer(name), []
    getattr(module, part).register_forward_hook(lambda _module, _given, found: seen.append(found.shape))
    through(module, fused())
    assert seen == [(3, 5, WIDE)] * 2, "the first call is the test's own"


def test_the_layers_of_a_gated_unit_keep_their_hooks(fused: Fused) -> None:
    module, seen = layer("llama"), []
    module.up_proj.register_forward_hook(lambda _module, _given, found: found * 2)
    module.down_proj.register_forward_pre_hook(lambda _module, given: seen.append(given[0].shape))
    expected, _ = through(module, nullcontext())
    found, ours = through(module, fused())
    assert any("gated_silu" in each for each in ours.operators)
    assert len(seen) == 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_other_activations_and_calls_without_gradients_stay_stocks(fused: Fused) -> None:
    bert = made("BertModel", "BertConfig", **SHAPE, hidden_act="relu").encoder.layer[0].intermediate.to("mps")
    _, counts = through(bert, fused())
    module, given = layer("llama"), torch.randn(3, NARROW, device="mps")
    with fused(), torch.no_grad(), simulator.counted() as eval_counts:
        module(given)
    assert not any(each.startswith("metal::") for each in (*counts.operators, *eval_counts.operators))


@pytest.mark.parametrize(
    ("kind", "config", "settings", "words"),
    [
        ("LlamaModel", "LlamaConfig", {}, "gated units in one kernel each way"),
        ("BertModel", "BertConfig", {}, "GELU in one kernel each way"),
        ("GPT2Model", "GPT2Config", {"n_embd": NARROW, "n_head": 1, "n_layer": 1}, "GELU in one kernel each way"),
        ("BertModel", "BertConfig", {"hidden_act": "relu"}, ""),
        ("OPTModel", "OPTConfig", {}, ""),
    ],
)
def test_the_plan_says_which_activations_it_takes(kind: str, config: str, settings: Any, words: str) -> None:
    shape = {} if kind == "GPT2Model" else SHAPE
    assert ACTIVATIONS.words(made(kind, config, **shape, **settings), "mps") == words


def test_a_gated_unit_keeps_a_tensor_less_for_the_backward_pass(fused: Fused) -> None:
    """Stock keeps the gate, its activation, the other factor and the product."""
    module, given = layer("llama"), torch.randn(1000, NARROW, device="mps", requires_grad=True)

    def held(context: AbstractContextManager[Any]) -> int:
        with context:
            before = torch.mps.current_allocated_memory()
            found = module(given)
            return torch.mps.current_allocated_memory() - before - found.nbytes

    assert held(nullcontext()) - held(fused()) >= 1000 * WIDE * 4


class Asked(torch.nn.Module):
    """As a model of diffusers, it warns of an attribute that its configuration has."""

    def __getattr__(self, name: str) -> Any:
        assert name not in ACTIVATION.values()
        return super().__getattr__(name)


def test_models_of_other_libraries_are_not_asked_for_an_activation() -> None:
    assert ACTIVATIONS.words(Asked(), "mps") == ""
