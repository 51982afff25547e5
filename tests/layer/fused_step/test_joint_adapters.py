"""LoRA computed with the layers that it adapts: stock's losses and gradients, and other adapters left to PEFT."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_mps.layer.fused_step import joint_projections
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused
from tests.layer.fused_step.families import trained

peft = pytest.importorskip("peft")

QUERY_VALUE, ALL = ["q_proj", "v_proj"], "all-linear"


def model(target: Any = QUERY_VALUE, **said: Any) -> Any:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=families.WORDS, **families.SHAPE))
    made = peft.get_peft_model(llama, peft.LoraConfig(target_modules=target, init_lora_weights=False, **said))
    return made.to("mps").train()


def agree(made: Any, fused: Fused) -> tuple[int, int]:
    """The launches of stock and of ours, whose losses and gradients are the same."""
    stock, loss, gradients = trained(made, nullcontext())
    counts, found, ours = trained(made, fused())
    assert found == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    return stock.launches, counts.launches


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many adapters were computed with their layers, of each product."""
    seen: list[int] = []
    apply = joint_projections.JointLinear.apply

    def noted(given: Any, plan: Any, *learned: Any) -> Any:
        seen.extend([len(plan.adapted)] if plan.adapted else [])
        return apply(given, plan, *learned)

    monkeypatch.setattr(joint_projections.JointLinear, "apply", noted)
    return seen


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, [2, 2]),
        ({"r": 4, "lora_alpha": 12}, [2, 2]),
        ({"target": ALL}, [3, 2, 3, 2]),
        ({"rank_pattern": {"q_proj": 2}}, [2, 2]),
    ],
    ids=["scaled by one", "scaled by three", "all layers", "of several ranks"],
)
def test_losses_and_gradients_are_stocks_in_fewer_launches(
    said: dict[str, Any], found: list[int], fused: Fused, computed: list[int]
) -> None:
    launches, fewer = agree(model(**said), fused)
    assert computed == found
    assert fewer < 0.75 * launches


def hooked() -> Any:
    made = model()
    for name, each in made.named_modules():
        if name.endswith("lora_A.default"):
            each.register_forward_hook(lambda module, given, out: out * 2)
    return made


def disabled() -> Any:
    made = model(bias="all")
    made.base_model.disable_adapter_layers()
    made.get_input_embeddings().weight.requires_grad_(True)
    return made


def whole() -> Any:
    made = model()
    for name, each in made.named_parameters():
        each.requires_grad_(each.requires_grad or "k_proj" in name)
    return made


OTHERS: dict[str, Callable[[], Any]] = {
    "dora": lambda: model(use_dora=True),
    "bias": lambda: model(lora_bias=True),
    "a hook within": hooked,
    "disabled": disabled,
    "layers that train": whole,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_are_pefts(name: str, fused: Fused, computed: list[int]) -> None:
    agree(OTHERS[name](), fused)
    assert computed == []


def test_dropout_is_pefts(fused: Fused, computed: list[int]) -> None:
    made = model(lora_dropout=0.5)
    trained(made, fused())
    assert computed == []
    agree(made.eval(), fused)
    assert computed == [2, 2]


def test_the_active_adapter_is_computed(fused: Fused, computed: list[int]) -> None:
    made = model()
    made.add_adapter("second", peft.LoraConfig(target_modules=QUERY_VALUE, init_lora_weights=False))
    made.set_adapter("second")
    agree(made.to("mps"), fused)
    assert computed == [2, 2]
    computed.clear()
    made.base_model.set_adapter(["default", "second"])
    agree(made, fused)
    assert computed == [], "two at once are PEFT's"


def test_gradients_of_gradients_are_stocks(fused: Fused) -> None:
    attention = model().base_model.model.model.layers[0].self_attn
    places = torch.zeros(1, 3, 16, device="mps")
    given = torch.ones(1, 3, 32, device="mps").cumsum(1).requires_grad_()

    def attended(given: Tensor, _: Tensor) -> Tensor:
        return attention(given, position_embeddings=(places + 1, places), attention_mask=None)[0]

    families.same_second_gradients(fused, attended, given, attention.q_proj.lora_B["default"].weight)


def test_an_adapter_is_saved_as_ever(fused: Fused, tmp_path: Any) -> None:
    made = model()
    values = {name: each.cpu().clone() for name, each in peft.get_peft_model_state_dict(made).items()}
    trained(made, fused())
    made.save_pretrained(tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], each) for name, each in values.items())
