"""Optimizers of bitsandbytes: paged ones are refused in one line, those that can run on Metal are let be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for
import torch
from torch import nn
from transformers import trainer_optimizer

from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards.platform.cuda import PAGED, UPDATES
from hf_mps.metal import fallback
from tests.layer.guards import loops

bitsandbytes = pytest.importorskip("bitsandbytes")


class GaLoreAdamW8bit(bitsandbytes.optim.optimizer.Optimizer2State):  # type: ignore[misc]
    """Made as galore_torch makes its own, on top of bitsandbytes'."""

    __module__ = "galore_torch.adamw8bit"

    def __init__(self, parameters: Any, *, optim_bits: int = 8) -> None:
        super().__init__("adam", parameters, 1e-3, (0.9, 0.999), 1e-8, 0.0, optim_bits)


@pytest.fixture(autouse=True)
def _no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer has embeddings step with 32 bits, by their places among the weights of whatever optimizer is made."""
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without bitsandbytes."""
    monkeypatch.setattr("hf_mps.layer.guards.platform.cuda.find_spec", lambda name: None)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: False)  # it remembers its answer


def parameter(elements: int = 2) -> nn.Parameter:
    made = nn.Parameter(torch.ones(elements, device="mps"))
    made.grad = torch.ones_like(made)
    return made


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_without_bitsandbytes_trainer_s_name_is_refused_before_anything_is_done(optim: str, tmp_path: Path) -> None:
    reason = (
        f"^optim={optim}: bitsandbytes is not installed, .*; next: adamw_torch, or Adafactor where memory is short$"
    )
    with pytest.raises(UserError, match=reason):
        loops.trainer(tmp_path, optim=optim)


@pytest.mark.usefixtures("absent")
def test_without_it_one_that_would_train_keeps_transformers_words(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="install `bitsandbytes`"):
        loops.trainer(tmp_path, optim="lion_32bit").train()


@pytest.mark.parametrize(
    ("optim", "instead"),
    [("paged_adamw_8bit", "adamw_8bit$"), ("paged_lion_8bit", "lion_8bit$"), ("paged_adamw_32bit", "adamw_torch, or")],
)
def test_trainer_s_name_is_refused_before_anything_is_done(optim: str, instead: str, tmp_path: Path) -> None:
    model = loops.bert()
    model.resize_token_embeddings(PAGED // model.config.hidden_size + 1)
    with pytest.raises(UserError, match=f"^optim={optim}: .*managed memory.*; next: {instead}"):
        loops.trainer(tmp_path, model, optim=optim)


@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "paged_adamw_32bit"])
def test_a_paged_one_trains_what_is_too_small_for_pages(optim: str, tmp_path: Path) -> None:
    """As the adapters of QLoRA's scripts are: bitsandbytes keeps their states on the device."""
    model = loops.bert()
    assert max(each.numel() for each in model.parameters()) < PAGED
    loops.trainer(tmp_path, model, optim=optim).train()
    weight = parameter(PAGED - 1)
    optimizer = bitsandbytes.optim.AdamW([weight], lr=0.1, is_paged=True)
    loops.new_accelerator().prepare_optimizer(optimizer)
    optimizer.step()
    assert weight[0].item() == pytest.approx(0.9, rel=1e-2)


def test_one_of_32_bits_steps_on_the_device_as_torch_s_own_does(tmp_path: Path) -> None:
    weight, other = parameter(), nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    bitsandbytes.optim.AdamW([weight], lr=0.1).step()
    torch.optim.AdamW([other], lr=0.1).step()
    assert weight.tolist() == pytest.approx(other.tolist(), rel=1e-4)
    assert UPDATES[32] not in fallback.registered(), "a kernel of bitsandbytes' own"
    loops.new_accelerator().prepare_optimizer(bitsandbytes.optim.AdamW([nn.Parameter(torch.ones(2))]))
    loops.trainer(tmp_path, optim="rmsprop_bnb")
    assert not guards.get("cuda-optimizer").times


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit"])
def test_one_of_8_bits_trains_by_trainer_s_name(optim: str, tmp_path: Path) -> None:
    trainer = loops.trainer(tmp_path, optim=optim)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__module__.startswith("bitsandbytes.")


@pytest.mark.parametrize("kind", [bitsandbytes.optim.Adam8bit, GaLoreAdamW8bit])
def test_the_step_of_8_bits_is_not_taken_to_the_cpu(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(64, 128, device="mps"))
    weight.grad = torch.ones_like(weight)
    optimizer = kind([weight])
    optimizer.step()
    assert optimizer.state[weight]["state1"].dtype == torch.uint8
    assert UPDATES[8] not in fallback.registered(), "the fallback would take the whole step to the CPU"


def test_one_that_is_asked_for_by_an_argument_is_refused_before_its_first_step() -> None:
    weight = parameter(PAGED)
    optimizer = bitsandbytes.optim.AdamW([weight], is_paged=True)
    with pytest.raises(UserError, match=r"^AdamW: .*managed memory"):
        optimizer.step()
    assert weight[:2].tolist() == [1.0, 1.0]
    before_it_moved = bitsandbytes.optim.AdamW([nn.Parameter(torch.ones(PAGED))], is_paged=True)
    with pytest.raises(UserError, match=r"^AdamW: .*managed memory"):
        loops.new_accelerator().prepare_optimizer(before_it_moved)


def test_on_the_cpu_nothing_is_refused() -> None:
    bitsandbytes.optim.Adam8bit([nn.Parameter(torch.ones(2))]).step()
