"""Linear layers of one input as one product: the same losses and gradients, and parameters that stay what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import BertConfig, BertForSequenceClassification, Qwen2Config, Qwen2ForCausalLM
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.t5 import modeling_t5

from hf_mps.layer.fused_step import joint_projections, spans
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused
from tests.layer.fused_step.families import trained

CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-6}, torch.bfloat16: {"rtol": 5e-2, "atol": 5e-3}}


def encoder() -> Any:
    config = BertConfig(vocab_size=families.WORDS, max_position_embeddings=families.LENGTH, **families.SHAPE)
    return BertForSequenceClassification(config).eval()  # nothing is drawn


def grouped() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=families.WORDS, num_key_value_heads=1, **families.SHAPE))


def adapted() -> Any:
    return families.decoder()[0].eval()


MODELS: dict[str, Callable[[], Any]] = {"encoder": encoder, "grouped heads": grouped, "LoRA": adapted}


def model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to("mps")


def owner(model: Any) -> Any:
    return next(each for each in model.modules() if type(each).__name__.endswith("SelfAttention"))


def together(model: Any) -> list[Any]:
    """Three layers of one input, in whichever names the model has them; PEFT's have the model's own inside."""
    kinds = {"query": ("query", "key", "value"), "q_proj": ("q_proj", "k_proj", "v_proj")}
    found = next(each for each in model.modules() if any(hasattr(each, first) for first in kinds))
    names = next(names for first, names in kinds.items() if hasattr(found, first))
    return [getattr(layer, "base_layer", layer) for layer in (getattr(found, name) for name in names)]


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_stocks_with_fewer_products(
    name: str, dtype: torch.dtype, device: str, fused: Fused
) -> None:
    """The CPU has, as CUDA, no one operator for all gradients."""
    made = model(name).to(device)
    said = {} if dtype == torch.float32 else {"autocast": dtype}
    before, loss, gradients = trained(made, nullcontext(), **said)
    with fused():
        joint_projections.JOINT_PROJECTIONS.devices = frozenset({device})
        after, found, ours = trained(made, nullcontext(), **said)
    if device == "mps":
        layers = {"encoder": 2, "grouped heads": 2 + 1, "LoRA": 2 + 1 + 3}[name] * families.SHAPE["num_hidden_layers"]
        assert before.operators["aten::linear"] - after.operators["aten::linear"] == layers
    else:
        assert spans.joined([each.weight for each in together(made)], 0) is not None
    assert found == pytest.approx(loss, rel=1e-6 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(ours, gradients, **CLOSE[dtype])


def test_which_layers_belong_together_is_read_in_the_models_source() -> None:
    found = {
        module.__name__.rpartition(".")[2]: dict(joint_projections.JOINT_PROJECTIONS._groups(module))
        for module in (modeling_bert, modeling_llama, modeling_t5)
    }
    assert found == snapshot(
        {
            "modeling_bert": {"BertSelfAttention": {"hidden_states": ("query", "key", "value")}},
            "modeling_llama": {
                "LlamaMLP": {"x": ("gate_proj", "up_proj")},
                "LlamaAttention": {"hidden_states": ("q_proj", "k_proj", "v_proj")},
            },
            "modeling_t5": {},
        }
    )


def test_a_forward_that_somebody_else_wrote_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", lambda self, x: self.down_proj(self.gate_proj(x)))
    assert "Qwen2MLP" not in dict(joint_projections._of_file(modeling_qwen2))


def test_parameters_stay_the_same_objects_with_the_same_values(fused: Fused, tmp_path: Path) -> None:
    made = model("encoder")
    before = list(made.parameters())
    values = {name: each.cpu().clone() for name, each in made.state_dict().items()}
    trained(made, fused())
    query, key, value = (getattr(owner(made), name).weight for name in ("query", "key", "value"))
    assert spans.joined((query, key, value), 0) is not None
    assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
    made.save_pretrained(tmp_path / "whole")
    torch.save(made.state_dict(), tmp_path / "weights.pt")
    loaded = type(made).from_pretrained(tmp_path / "whole").state_dict()
    for found in (made.state_dict(), loaded, torch.load(tmp_path / "weights.pt")):
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name].cpu(), each) for name, each in values.items())


def test_a_copy_or_a_move_trains_on_alike(fused: Fused) -> None:
    made = model("encoder")
    with fused():
        _, loss, _ = trained(made, nullcontext())
        _, copied, _ = trained(copy.deepcopy(made), nullcontext())
        _, moved, _ = trained(made.cpu().to("mps"), nullcontext())
    assert loss == copied == moved


@pytest.mark.parametrize("how", ["frozen", "biases alone"])
def test_what_is_frozen_gets_no_gradient(how: str, fused: Fused) -> None:
    made = model("encoder")
    for name, each in made.named_parameters():
        each.requires_grad_("key" not in name if how == "frozen" else "bias" in name)
    _, _, gradients = trained(made, nullcontext())
    _, _, ours = trained(made, fused())
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["shared", "wrapped", "hooked"])
def test_layers_that_are_not_as_they_should_be_are_left_alone(how: str, fused: Fused) -> None:
    made = model("encoder")
    for each in made.modules():
        if type(each).__name__.endswith("SelfAttention"):
            if how == "shared":
                each.held = each.query.weight.detach()[:2]
            elif how == "wrapped":
                each.key = torch.nn.utils.parametrizations.weight_norm(each.key)
            else:
                each.value.forward = torch.nn.Linear.forward.__get__(each.value)
    stock, _, gradients = trained(made, nullcontext())
    found, _, ours = trained(made, fused())
    assert found.operators["aten::linear"] == stock.operators["aten::linear"]
    assert ours.keys() == gradients.keys()


def test_hooks_of_each_layer_run(fused: Fused) -> None:
    made, seen = model("encoder"), []
    owner(made).key.register_forward_hook(lambda module, given, out: seen.append(out.shape[-1]))
    trained(made, fused())
    assert seen == [families.SHAPE["hidden_size"]]
    assert "forward" not in vars(owner(made).key)


def test_gradients_of_gradients_are_stocks(fused: Fused) -> None:
    torch.manual_seed(0)
    config = modeling_llama.LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    mlp = modeling_llama.LlamaMLP(config).to("mps")
    given = torch.randn(2, 3, 8, device="mps", requires_grad=True)
    families.same_second_gradients(fused, lambda x, _: mlp(x), given, mlp.up_proj.weight, tolerance=1e-4)


def test_a_checkpointed_layer_is_replayed(fused: Fused) -> None:
    made = model("encoder").train()
    made.config.hidden_dropout_prob = made.config.attention_probs_dropout_prob = 0.0
    for each in made.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    _, loss, gradients = trained(made, fused())
    made.gradient_checkpointing_enable({"use_reentrant": False})
    _, again, ours = trained(made, fused())
    assert again == loss
    assert all(torch.equal(ours[name], each) for name, each in gradients.items())
