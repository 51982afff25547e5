"""A model that asks for attention made for CUDA trains with sdpa, said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from tests.layer.guards import loops

NAMES = ("flash_attention_2", "flash_attention_3", "flex_attention")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small BERT."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads outlive the load
    loops.bert().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_loaded_with_sdpa_in_its_place(name: str, saved: Path) -> None:
    with pytest.warns(GuardNotice, match=f"attn_implementation={name} cannot train on Metal: sdpa takes its place"):
        model = AutoModelForSequenceClassification.from_pretrained(saved, attn_implementation=name)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_is_told_to_change_is_looked_at_too() -> None:
    model = loops.bert()
    model.set_attn_implementation("flex_attention")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_what_trains_stays(name: str, saved: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(saved, attn_implementation=name)
    assert model.config._attn_implementation == name
    assert not guards.get("attention").times


def test_on_the_cpu_it_stays_an_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_DEVICE", "cpu")
    with pytest.raises(ImportError, match="FlashAttention2"):
        AutoModelForSequenceClassification.from_pretrained(saved, attn_implementation="flash_attention_2")
