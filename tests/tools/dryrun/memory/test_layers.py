"""A deep model is planned from a few of its layers, and needs and launches what the trace of all of them says."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_mps.layer.fused_step.attention import blockwise
from hf_mps.tools.dryrun import layers, metal_device, prepare
from hf_mps.tools.dryrun.audit import audit
from hf_mps.tools.dryrun.launches import Launches, of_calls, table_of
from hf_mps.tools.dryrun.memory import trace
from hf_mps.tools.dryrun.memory.plan import estimate
from hf_mps.tools.dryrun.memory.trace import Estimate, Tracer
from hf_mps.tools.dryrun.resolve import resolve_target

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SMALL = LLAMA | {"num_key_value_heads": 2, "head_dim": 16}
ZAMBA = LLAMA | {"model_type": "zamba", "num_hidden_layers": 22, "num_key_value_heads": 4, "n_mamba_heads": 2}
CROSSED = SMALL | {"num_hidden_layers": 20, "cross_attention_layers": [3, 8, 13, 18], "pad_token_id": 0}
MLLAMA = {"model_type": "mllama", "text_config": CROSSED}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 512, "num_layers": 8}
LORA = ["lora={r: 4}", "training.gradient_checkpointing=true"]
MODELS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "all weights": ("causal-lm", [], LLAMA),
    "checkpointing": ("causal-lm", ["training.gradient_checkpointing=true"], LLAMA),
    "LoRA": ("causal-lm", LORA, LLAMA),
    "LoRA over 4 bits": ("causal-lm", [*LORA, "quantization=nf4", "weights=bfloat16"], LLAMA),
    "a wide output layer": ("causal-lm", [], LLAMA | {"vocab_size": 40000, "hidden_size": 32}),
    "Adafactor": ("causal-lm", ["training.optim=adafactor"], LLAMA),
    "two towers": ("summarization", [], T5 | {"model_type": "t5", "num_decoder_layers": 10}),
    "two towers alike": ("summarization", [], T5 | {"model_type": "t5"}),
    "two kinds of layers": ("causal-lm", [], SMALL | {"model_type": "gemma2", "sliding_window": 16}),
    "named layers": (
        "causal-lm",
        [],
        SMALL | {"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 4},
    ),
    "layers of two classes, some with shared weights": ("causal-lm", [], ZAMBA),
    "layers of a class that are left out of texts": ("causal-lm", [], MLLAMA),
    "LoRA over shared weights": ("causal-lm", LORA, ZAMBA),
    "a teacher": ("distill", [*LORA, "max_length=32"], LLAMA),
    "an encoder": ("masked-lm", [], LLAMA | {"model_type": "bert"}),
    "pictures": ("image-classification", [], LLAMA | {"model_type": "vit", "image_size": 32, "patch_size": 8}),
}


@pytest.mark.rotated
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_few_layers_tell_the_peak_and_the_launches_of_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, words, config = MODELS[name]
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    rows = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
    target, device = resolve_target(str(tmp_path), [*rows, *words], task), metal_device()
    table = table_of(None)

    def told() -> tuple[Estimate, Launches]:
        with prepare.weightless(target) as parts:
            estimate = Tracer(parts, device, None if task == "image-classification" else 32, record=True)()
        return estimate, of_calls(estimate.recorded.calls, table, estimate.recorded.more)  # type: ignore[arg-type]

    short: list[bool] = []
    scaled = trace.scaled
    monkeypatch.setattr(trace, "scaled", lambda base, more: short.append(bool(more)) or scaled(base, more))
    planned, launches = told()
    assert short == [True]  # no trace of all layers after it
    monkeypatch.setattr(layers, "cut", lambda *_, **__: None)
    whole, every = told()
    assert planned.bytes == pytest.approx(whole.bytes, rel=0.001)
    assert planned.parts == pytest.approx(whole.parts, rel=0.001, abs=0.001 * whole.bytes)
    assert planned.where.partition(":")[0] == whole.where.partition(":")[0]
    assert planned.recorded.places.keys() == whole.recorded.places.keys()
    assert launches.values() == every.values()


@pytest.mark.slow
def test_every_batch_of_a_search_is_traced_in_the_same_few_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, words, config = MODELS["a teacher"]
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    kept: list[Any] = []
    few = layers.few
    monkeypatch.setattr(layers, "few", lambda each, *models: kept.append(dict(each)) or few(each, *models))
    with prepare.weightless(resolve_target(str(tmp_path), words, task)) as parts:
        tracer = Tracer(parts, metal_device(), 16)
        tracer(2)
        first = kept.copy()
        tracer(3)
    assert {len(numbers) for numbers in first[0].values()} == {3}
    assert kept[len(first) :] == first


def model(*sizes: int) -> torch.nn.Module:
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList(torch.nn.Linear(8, size) for size in sizes)
    return made


def kept(model: torch.nn.Module) -> Any:
    found = layers.cut(model)
    return found and [found.base, *((each, lacking) for each, lacking in found.more)]


def test_the_first_layer_the_last_and_one_of_each_kind_between_are_kept() -> None:
    assert kept(model(*[8] * 12)) == [{"layers": [0, 10, 11]}, ({"layers": [0, 1, 10, 11]}, 9)]
    assert kept(model(*[8] * 5)) is None
    assert kept(model(*range(1, 13))) is None
    gemma = model(*[8] * 12)
    for number, layer in enumerate(gemma.layers):  # type: ignore[arg-type]
        layer.attention_type = "full" if number % 6 == 5 else "sliding"
    assert kept(gemma) == [{"layers": [0, 5, 10, 11]}, ({"layers": [0, 1, 5, 10, 11]}, 8)]


def test_lists_that_lack_as_many_layers_share_a_further_trace() -> None:
    towers = torch.nn.ModuleDict({"first": model(*[8] * 12), "second": model(*[4] * 12), "third": model(*[8] * 9)})
    base = {"first.layers": [0, 10, 11], "second.layers": [0, 10, 11]} | {"third.layers": [0, 7, 8]}
    more = {"first.layers": [0, 1, 10, 11], "second.layers": [0, 1, 10, 11]}
    assert kept(towers) == [base, (base | more, 9), (base | {"third.layers": [0, 1, 7, 8]}, 6)]


def test_layers_that_the_configuration_names_by_number_are_a_kind() -> None:
    made = model(*[8] * 24)
    made.full_indexes = [7, 15, 23]
    assert kept(made)[0] == {"layers": [0, 15, 22, 23]}
    with layers.few({"layers": [0, 15, 22, 23]}, made):
        assert made.full_indexes == [1, 3]
    assert made.full_indexes == [7, 15, 23]


def test_a_model_is_whole_again_after_a_short_trace() -> None:
    made = torch.nn.Module()
    made.inner = model(*[2] * 12)
    whole = made.inner.layers
    with layers.few({"inner.layers": [0, 10, 11]}, made):
        assert list(made.inner.layers) == [whole[0], whole[10], whole[11]]  # type: ignore[index]
    assert made.inner.layers is whole


@pytest.mark.slow
def test_an_audit_of_a_few_layers_finds_the_calls_and_the_launches_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model(**LLAMA).save_pretrained(tmp_path)
    target = resolve_target(str(tmp_path), ["training.per_device_train_batch_size=2"], "causal-lm")
    told = audit(target)
    monkeypatch.setattr(layers, "cut", lambda *_, **__: None)
    whole = audit(target)
    assert {each.operator: each.calls for each in told.entries} == {each.operator: each.calls for each in whole.entries}
    assert told.launches.values() == whole.launches.values()  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_short_trace_that_fails_logs_nothing(tmp_path: Path) -> None:
    """Jamba's model computes the kind of each number from the configuration, and gives a layer another one's mask."""
    experts = {"num_experts": 2, "attn_layer_period": 4, "attn_layer_offset": 2, "num_hidden_layers": 32}
    AutoConfig.for_model(**SMALL | experts | {"model_type": "jamba"}).save_pretrained(tmp_path)
    target = resolve_target(str(tmp_path), ["training.per_device_train_batch_size=2"], "causal-lm")
    said, logger = list[logging.LogRecord](), logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with prepare.weightless(target) as parts:
            assert layers.cut(parts.prepared.model) is not None
            Tracer(parts, metal_device(), 16)()
    finally:
        logger.removeHandler(handler)
    assert said == []


@pytest.mark.slow
def test_where_gradients_are_most_of_a_step_those_of_two_kinds_of_layers_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 18, "sliding_window": 16}
    AutoConfig.for_model(**SMALL | sizes | {"model_type": "gemma3_text"}).save_pretrained(tmp_path)
    one = ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=1"]
    target = resolve_target(str(tmp_path), one, "causal-lm")
    planned = estimate(target, length=4)
    monkeypatch.setattr(layers, "cut", lambda *_, **__: None)
    whole = estimate(target, length=4)
    assert whole.parts["activations"] < whole.bytes / 20
    assert planned.parts == whole.parts


@pytest.mark.slow
def test_a_model_whose_layers_get_what_all_before_them_made_is_told_by_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inkling 2 attends to what all blocks of layers before made, so that a layer does more, the more there are."""
    heads = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "vocab_size": 512}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "unpadded_vocab_size": 512}
    config = SMALL | heads | experts | {"num_hidden_layers": 24, "model_type": "inkling2_text"}
    AutoConfig.for_model(**config, eos_token_id=1).save_pretrained(tmp_path)
    target = resolve_target(str(tmp_path), ["training.per_device_train_batch_size=2"], "causal-lm")
    with prepare.weightless(target) as parts:
        assert layers.cut(parts.prepared.model) is not None
        planned = Tracer(parts, metal_device(), 16)()
    monkeypatch.setattr(layers, "cut", lambda *_, **__: None)
    with prepare.weightless(target) as parts:
        assert planned.parts == Tracer(parts, metal_device(), 16)().parts


@pytest.mark.slow
def test_a_model_that_goes_through_its_layers_by_number_is_told_by_all_of_them(tmp_path: Path) -> None:
    """XLM has four lists, one for each part of a layer, and counts to `n_layers`."""
    config = {"n_words": 512, "vocab_size": 512, "emb_dim": 64, "n_heads": 4, "n_layers": 8}
    AutoConfig.for_model("xlm", **config, max_position_embeddings=64).save_pretrained(tmp_path)
    target = resolve_target(str(tmp_path), ["training.per_device_train_batch_size=2"], "masked-lm")
    with prepare.weightless(target) as parts:
        assert layers.cut(parts.prepared.model) is not None
        planned = Tracer(parts, metal_device(), 16)()
        trained = sum(each.nbytes for each in parts.prepared.model.parameters())
    assert planned.parts["weights"] == pytest.approx(trained, rel=0.001)
    assert planned.parts["optimizer"] == pytest.approx(2 * trained, rel=0.01)  # Adam has two moments of each weight
    products = {each.operator: each.calls for each in audit(target).entries}["aten::linear"]
    assert products >= 6 * 8  # four of attention and two of the feed-forward part in each layer


@pytest.mark.slow
def test_attention_in_blocks_is_followed_once_and_counted_at_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model(**LLAMA | {"max_position_embeddings": 2048, "num_hidden_layers": 4}).save_pretrained(tmp_path)
    words = ["attention=blockwise", "training.per_device_train_batch_size=2", "training.gradient_checkpointing=true"]
    target, blocks = resolve_target(str(tmp_path), words, "causal-lm"), []
    scores = blockwise._Call.scores
    monkeypatch.setattr(blockwise._Call, "scores", lambda *given: blocks.append(1) or scores(*given))
    told, followed = estimate(target, length=2048, record=True), len(blocks)
    monkeypatch.setattr(trace.Memory, "once", lambda _, stock, name=None: stock)
    every = estimate(target, length=2048, record=True)
    assert 0 < 4 * followed < len(blocks)
    assert (told.bytes, told.parts, told.where) == (every.bytes, every.parts, every.where)
    assert told.recorded.places == every.recorded.places
    assert Counter(told.recorded.calls) == Counter(every.recorded.calls)
