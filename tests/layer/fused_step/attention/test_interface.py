"""Models of transformers train with attention in blocks as with PyTorch's, with their code as it is."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hf_mps.layer.fused_step.attention import NAME, interface

LENGTH = 40
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**SIZE, "num_key_value_heads": 2, "vocab_size": 100}
DRY = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
BART = {
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 1), ("ffn_dim", 64))},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "pad_token_id": 0, **DRY},
}
T5 = {"d_model": 32, "num_layers": 1, "num_heads": 4, "d_ff": 64, "d_kv": 8, "dropout_rate": 0.0}
BERT = {**SIZE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen2": (AutoModelForCausalLM, "qwen2", GROUPED),
    "packed": (AutoModelForCausalLM, "qwen2", GROUPED),
    "sliding": (AutoModelForCausalLM, "mistral", {**GROUPED, "sliding_window": 12}),
    "bert": (AutoModelForSequenceClassification, "bert", BERT),
    "t5": (AutoModelForSeq2SeqLM, "t5", {**T5, "decoder_start_token_id": 0}),
    "bart": (AutoModelForSeq2SeqLM, "bart", BART),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for every call of these small models."""
    monkeypatch.setattr(interface, "attention", functools.partial(interface.attention, budget=4 * 3000))


def made(name: str, **more: Any) -> Any:
    kind, architecture, size = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{"vocab_size": 100, **size, **more})
    return kind.from_config(config).to("mps").train()


def batch(name: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH).remainder(90) + 5
    there = torch.ones_like(ids)
    there[0, 25:] = 0
    if name == "bert":
        given = {"input_ids": ids, "attention_mask": there, "labels": torch.tensor([0, 1])}
    elif name == "packed":
        positions = torch.cat([torch.arange(18), torch.arange(LENGTH - 18)]).expand(2, -1)
        given = {"input_ids": ids, "position_ids": positions, "labels": ids}
    elif name in ("t5", "bart"):
        given = {"input_ids": ids, "attention_mask": there, "labels": ids[:, :20].contiguous()}
    else:
        given = {"input_ids": ids, "attention_mask": there, "labels": ids.masked_fill(there == 0, -100)}
    return {name: tensor.to("mps") for name, tensor in given.items()}


def loss_and_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([loss.detach().float().view(1), *gradients]).cpu()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_pytorchs_attention(name: str) -> None:
    model, inputs = made(name), batch(name)
    right = loss_and_gradients(model, inputs)
    model.set_attn_implementation(NAME)
    found = loss_and_gradients(model, inputs)
    assert float((found - right).norm() / right.norm()) < 1e-5


def test_a_checkpointed_layer_draws_the_same_dropout_again() -> None:
    model, inputs = made("qwen2", attention_dropout=0.2), batch("qwen2")
    model.set_attn_implementation(NAME)
    torch.manual_seed(3)
    right = loss_and_gradients(model, inputs)
    for reentrant in (False, True):
        checkpointed(model, reentrant)
        torch.manual_seed(3)
        assert torch.equal(loss_and_gradients(model, inputs), right)


def checkpointed(model: Any, reentrant: bool) -> None:
    """Its name is another one from transformers 5.23 on."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def test_autocast_takes_it_to_half_precision_as_it_does_with_pytorchs() -> None:
    model, inputs = made("qwen2"), batch("qwen2")
    with torch.autocast("mps", torch.bfloat16):
        right = loss_and_gradients(model, inputs)
        model.set_attn_implementation(NAME)
        found = loss_and_gradients(model, inputs)
    assert float((found - right).norm() / right.norm()) < 1e-2


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of any tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("name", ["sliding", "bert"])
def test_no_tensor_of_a_step_has_the_square_of_the_length(name: str) -> None:
    model = made(name, max_position_embeddings=1024)
    inputs = batch(name)
    there = torch.ones(2, 300, dtype=torch.long, device="mps")
    there[0, 200:] = 0
    ids = torch.full_like(there, 7)
    inputs |= {"input_ids": ids, "attention_mask": there}
    inputs["labels"] = inputs["labels"] if name == "bert" else ids
    largest = {}
    for implementation in (NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        with Largest() as mode:
            loss_and_gradients(model, inputs)
        largest[implementation] = mode.elements
    assert largest["sdpa"] >= 300 * 300
    assert largest[NAME] < 300 * 300


def test_generation_writes_the_same_words() -> None:
    model, inputs = made("qwen2").eval(), batch("qwen2")
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].flip(1)}
    words = []
    for implementation in ("sdpa", NAME):
        model.set_attn_implementation(implementation)
        words.append(model.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
    assert words[0] == words[1]


def test_a_script_asks_for_it_by_name_and_the_saved_model_does_not_need_it(tmp_path: Path) -> None:
    made("bert").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    model.save_pretrained(tmp_path / "again")
    assert NAME not in json.dumps(json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8")))


def test_what_stands_in_its_way_is_said() -> None:
    model = made("bert")
    assert interface.obstacle(model) == ""
    model.set_attn_implementation("eager")
    assert interface.obstacle(model) == "BertForSequenceClassification computes its attention with eager"
    assert interface.obstacle(torch.nn.Linear(1, 1)) == "Linear is no model of transformers"
