"""cuDNN's attention is left out of runs that would not repay its plans, and for no longer than they train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import BertConfig, ViTConfig

from hf_mps.core.choice import Choice
from hf_mps.finetune.features import attention
from hf_mps.finetune.text.lengths import Lengths
from tests.finetune import builders

MRPC = [24] * 16 + [40] * 16


def decided(
    monkeypatch: pytest.MonkeyPatch,
    *,
    counts: Any = MRPC,
    config: Any = None,
    steps: int = 575,
    precision: str = "bf16",
    device: str = "cuda",
    capability: tuple[int, int] = (9, 0),
    **said: Any,
) -> str:
    """Decide for BERT-base on a GPU of this capability, whose name and capability are all that CUDA is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    columns = {"text": "a", "text_pair": "b"}
    recipe = builders.recipe(
        task="text-classification", model="m", data={"generated": "pairs", "columns": columns}, **said
    )
    choices = {
        "precision": Choice(precision, ""),
        "steps": Choice(steps, ""),
        "batch": Choice(32, ""),
        "lengths": Choice(Lengths(512, "list", (24, 40, 512)), ""),
    }
    plan = SimpleNamespace(device=Choice(device, ""), choices=choices, arguments={})
    prepared = SimpleNamespace(token_counts=counts, model=SimpleNamespace(config=config or BertConfig()))
    return str(attention.choose_kernels(plan, prepared, recipe))  # type: ignore[arg-type]


def test_a_short_run_goes_without_cudnn_and_a_long_one_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch) == snapshot(
        "PyTorch's own (cuDNN's would save 0.0 s of the run, and their plans of 2 shapes take 1.8)"
    )
    long = decided(monkeypatch, counts=[400, 500], steps=20_000)
    assert long == snapshot("cuDNN's (they save 290 s of the run, and their plans of 1 shape take 1.6)")


@pytest.mark.parametrize(
    "other",
    [
        {"device": "mps"},
        {"precision": "fp32"},
        {"capability": (8, 0)},
        {"counts": None},
        {"optimizations": False},
        {"attention": "eager"},
    ],
    ids=str,
)
def test_nothing_is_said_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    assert decided(monkeypatch, **other) == "None"


def test_without_padding_flash_kernels_are_the_other_ones_and_cudnn_gains_less(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = decided(monkeypatch, counts=[40, 512], steps=20_000)
    packed = decided(monkeypatch, counts=[512, 512], steps=20_000)
    assert (padded, packed) == snapshot(
        (
            "cuDNN's (they save 146 s of the run, and their plans of 2 shapes take 1.8)",
            "cuDNN's (they save 48 s of the run, and their plans of 1 shape take 1.6)",
        )
    )


def test_images_have_as_many_tokens_as_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, counts=None, config=ViTConfig(), steps=300) == snapshot(
        "PyTorch's own (cuDNN's would save 0.1 s of the run, and their plans of 1 shape take 1.6)"
    )


def test_a_users_own_switch_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attention.USERS, "1")
    assert decided(monkeypatch) == "None"


def test_cudnn_is_back_after_the_training() -> None:
    with attention.with_kernels(Choice(attention.OWN, "")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_user_who_left_it_out_keeps_it_out() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with attention.with_kernels(Choice(attention.OWN, "")):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
