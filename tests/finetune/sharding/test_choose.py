"""Whether a model is divided: who may say so, how it is then divided, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from inline_snapshot import snapshot
from transformers import BertConfig, BertForSequenceClassification, SegformerConfig, SegformerForSemanticSegmentation

from hf_mps.core.errors import UserError
from hf_mps.finetune import sharding, tasks
from hf_mps.finetune.recipe.resolve import load_recipe
from tests.refusals import refusal

BY_FILE = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def bert() -> Any:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(**shape, vocab_size=20))


def segformer() -> Any:
    return SegformerForSemanticSegmentation(SegformerConfig(hidden_sizes=[8, 8, 8, 8], decoder_hidden_size=8))


def chosen(*words: str, name: str = "glue/mrpc", device: str = "cpu", model: Callable[[], Any] = bert) -> Any:
    recipe = load_recipe(name, words).recipe
    prepared: Any = SimpleNamespace(model=model(), task=tasks.find(recipe.task))
    return sharding.choose(recipe, recipe.training, prepared, device)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def test_nothing_is_divided_unasked(two_ranks: None) -> None:
    assert chosen() is None


def test_what_is_divided_is_told(two_ranks: None) -> None:
    assert str(chosen("training.fsdp=true")) == snapshot(
        "FSDP2 over 2 ranks (training.fsdp in the recipe; weights, gradients and the optimizer's state are divided and"
        " each BertLayer is gathered while it computes)"
    )


def test_accelerates_file_asks_too(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BY_FILE.items():
        monkeypatch.setenv(name, value)
    assert "accelerate's configuration file" in chosen().reason
    assert chosen("training.fsdp=false") is None
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert refusal(chosen) == snapshot(
        "accelerate's configuration file asks for FSDP 1; allowed: 2; next: fsdp_version: 2 in its fsdp_config"
    )


def test_one_process_has_nothing_to_divide_over() -> None:
    assert refusal(chosen, "training.fsdp=true") == snapshot(
        "FSDP (training.fsdp in the recipe) divides a model over several processes, and this is one; next: torchrun"
        " --nproc_per_node 2 -m hf_mps.finetune RECIPE; what each would hold: hf-mps plan RECIPE --ranks 2"
    )


def test_metal_would_keep_what_is_gathered(two_ranks: None) -> None:
    with pytest.raises(UserError, match=r"on mps PyTorch cannot free a storage, .*; next: LoRA"):
        chosen("training.fsdp=true", device="mps")


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("dpo/ultrafeedback", (), "its reference model would stay whole"),
        ("sentence-embeddings/stsb", (), "calls the parts of a model by themselves"),
        ("summarization/xsum", (), "token by token"),
        ("glue/mrpc", ("training.optim=adafactor",), "allowed: adamw_torch, adamw_torch_fused, sgd"),
        ("glue/mrpc", ("step_in_backward=true",), "a rank has parts of them"),
        ("glue/mrpc", ("weights=bfloat16",), "a rank has parts of them"),
    ],
)
def test_what_does_not_go_with_it_is_refused(two_ranks: None, name: str, words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=why):
        chosen("training.fsdp=true", *words, name=name)


def test_a_model_without_input_embeddings_is_refused_before_accelerate_asks_for_them(two_ranks: None) -> None:
    with pytest.raises(NotImplementedError):  # what accelerate's fsdp2_prepare_model meets on every rank
        segformer().get_input_embeddings()
    with pytest.raises(UserError, match="input embeddings of a SegformerForSemanticSegmentation, which has none; next"):
        chosen("training.fsdp=true", model=segformer)
    with pytest.raises(UserError, match="which has none; next"):  # as a plan of several ranks asks
        sharding.plugin({"fsdp": True}, segformer())


def test_how_without_whether_is_refused(two_ranks: None) -> None:
    with pytest.raises(UserError, match=r"next: training\.fsdp=true"):
        chosen("training.fsdp_config={reshard_after_forward: false}")


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("training.fsdp=full_shard", "allowed: true or false; fsdp_config says how"),
        ("training.fsdp_config={version: 1}", "has version 1; allowed: 2"),
        ("training.fsdp_config={reshard: true}", "allowed: version, reshard_after_forward"),
        ("training.fsdp_config={fsdp_backward_prefetch: X}", "belongs to FSDP1; leave it out"),
        ("training.fsdp_config={state_dict_type: LOCAL}", "allowed: SHARDED_STATE_DICT, FULL_STATE_DICT"),
    ],
)
def test_the_section_is_checked_word_by_word(word: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        load_recipe("glue/mrpc", ["training.fsdp=true", word] if "fsdp_config" in word else [word])


def test_the_users_word_beats_the_defaults() -> None:
    said = {"fsdp": True, "fsdp_config": {"fsdp_state_dict_type": sharding.FULL, "reshard_after_forward": False}}
    assert sharding.plugin(said, bert()) == {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": "BertLayer",
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": False,
    }


def test_a_block_that_holds_the_word_embedding_is_none() -> None:
    model = bert()
    assert "BertEmbeddings" in model._no_split_modules
    assert sharding.blocks(model) == ["BertLayer"]
