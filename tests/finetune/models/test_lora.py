"""LoRA: which layers carry an adapter, what trains, and that a merged model answers as the adapted one did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import AutoModelForCausalLM

from hf_mps.core.errors import UserError
from hf_mps.finetune.models import lora
from hf_mps.finetune.models.lora import Lora


@pytest.fixture
def model(qwen3: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(qwen3)


def disturb(adapted: Any) -> None:
    """Give the adapters weights as if they had been trained; they begin as a change of nothing."""
    torch.manual_seed(3)
    for name, weight in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.1)


class Holder:
    """What `lora.save` asks of a trainer."""

    def __init__(self, model: Any, place: str) -> None:
        from transformers import AutoTokenizer

        self.model = model
        self.processing_class = AutoTokenizer.from_pretrained(place)

    def save_model(self, folder: str) -> None:
        self.model.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)


def test_every_linear_layer_but_the_output_layer_carries_an_adapter(model: Any) -> None:
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)} - {"lm_head"}
    adapted, choice = lora.apply(model, Lora(r=4), "CAUSAL_LM")
    carrying = {
        name.removeprefix("base_model.model.") for name, part in adapted.named_modules() if hasattr(part, "lora_A")
    }
    assert carrying == linear
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    count = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert choice.value == "rank 4, alpha 32"
    assert choice.reason.startswith(f"{count:,} of ")
    assert "q_proj" in choice.reason


def test_the_layers_that_the_recipe_names_are_taken_alone(model: Any) -> None:
    adapted, choice = lora.apply(model, Lora(target_modules=["q_proj", "v_proj"]), "CAUSAL_LM")
    parts = {name.rpartition(".")[2] for name, part in adapted.named_modules() if hasattr(part, "lora_A")}
    assert parts == {"q_proj", "v_proj"}
    assert "on the recipe's layers: q_proj, v_proj" in choice.reason


def test_a_layer_that_is_not_there_is_refused_even_beside_one_that_is(model: Any) -> None:
    with pytest.raises(UserError) as raised:
        lora.apply(model, Lora(target_modules=["q_proj", "v_prj"]), "CAUSAL_LM")
    assert str(raised.value).startswith(
        "lora.target_modules has 'v_prj', and Qwen3ForCausalLM has no such layer; allowed: all-linear, "
    )
    assert str(raised.value).endswith("did you mean 'v_proj'?")


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_the_saved_model_answers_as_the_adapted_one(model: Any, qwen3: str, tmp_path: Path, export: str) -> None:
    from peft import AutoPeftModelForCausalLM

    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        plain = model.eval()(input_ids=ids).logits
        said = Lora(r=4, export=export)
        adapted, _ = lora.apply(model, said, "CAUSAL_LM")
        disturb(adapted)
        wanted = adapted.eval()(input_ids=ids).logits
        assert not torch.allclose(wanted, plain, atol=1e-2)
        lora.save(Holder(adapted, qwen3), tmp_path, said)
        kind = AutoModelForCausalLM if export == "merged" else AutoPeftModelForCausalLM
        loaded = kind.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)
        # What trained is as it was, adapters on and off.
        torch.testing.assert_close(adapted(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(input_ids=ids).logits, plain, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "adapter_config.json").is_file() is (export == "adapter")
    assert (tmp_path / "tokenizer.json").is_file()


def test_a_snippet_is_needed_for_an_adapter_alone() -> None:
    assert lora.snippet(Lora(), "AutoModelForCausalLM") is None
    words = lora.snippet(Lora(export="adapter"), "AutoModelForSeq2SeqLM")
    assert words.splitlines()[0] == snapshot("from peft import AutoPeftModelForSeq2SeqLM")


def test_checkpointed_blocks_give_the_adapters_the_same_gradients(qwen3: str) -> None:
    ids = torch.arange(5, 25)[None]
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(2)  # half of an adapter begins at random
        loaded = AutoModelForCausalLM.from_pretrained(qwen3)
        adapted, _ = lora.apply(loaded, Lora(r=4), "CAUSAL_LM", checkpointed=checkpointed)
        disturb(adapted)
        if checkpointed:
            adapted.gradient_checkpointing_enable()
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: one.grad for name, one in adapted.named_parameters() if one.requires_grad})
    plain, checkpointed_ones = gradients
    assert plain.keys() == checkpointed_ones.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed_ones[name], gradient)
        assert gradient.abs().sum() > 0
