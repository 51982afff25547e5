"""Optimizers of bitsandbytes: those that cannot run on Metal are refused in one line, those that can are let be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards.platform.cuda import UPDATES
from hf_mps.metal import fallback
from hf_mps.metal.fallback import registration
from tests.layer.guards import loops

bitsandbytes = pytest.importorskip("bitsandbytes")


class GaLoreAdamW8bit(bitsandbytes.optim.optimizer.Optimizer2State):  # type: ignore[misc]
    """Made as galore_torch makes its own, on top of bitsandbytes'."""

    __module__ = "galore_torch.adamw8bit"

    def __init__(self, parameters: Any, *, optim_bits: int = 8) -> None:
        super().__init__("adam", parameters, 1e-3, (0.9, 0.999), 1e-8, 0.0, optim_bits)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without bitsandbytes."""
    from transformers import trainer_optimizer

    monkeypatch.setattr("hf_mps.layer.guards.platform.cuda.find_spec", lambda name: None)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: False)  # it remembers its answer


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2, device="mps"))
    made.grad = torch.ones_like(made)
    return made


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
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
    ("optim", "reason"),
    [
        ("adamw_bnb_8bit", "no kernel of 8-bit optimizers for mps"),
        ("lion_8bit", "no kernel of 8-bit optimizers for mps"),
        ("paged_adamw_8bit", "managed memory"),
        ("paged_adamw_32bit", "managed memory"),
    ],
)
def test_trainer_s_name_is_refused_before_anything_is_done(optim: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^optim={optim}: .*{reason}.*; next: adamw_torch, or Adafactor"):
        loops.trainer(tmp_path, optim=optim)


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


@pytest.mark.parametrize("kind", [bitsandbytes.optim.Adam8bit, GaLoreAdamW8bit])
def test_one_of_8_bits_is_refused_when_it_is_made(kind: Any) -> None:
    with pytest.raises(UserError, match=r"8bit: the installed bitsandbytes has no kernel of 8-bit .*next: torch.optim"):
        kind([parameter()])


def test_a_kernel_for_the_cpu_alone_is_none() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(UPDATES[8], "CPU")
    assert UPDATES[8] in fallback.registered(), "the fallback could take the whole step to the CPU"
    assert "8-bit" in guards.get("cuda-optimizer").applies().reason


@pytest.mark.parametrize(
    ("asked", "reason"), [({"optim_bits": 8}, "no kernel of 8-bit optimizers"), ({"is_paged": True}, "managed memory")]
)
def test_one_that_is_asked_for_by_an_argument_is_before_its_first_step(asked: dict[str, Any], reason: str) -> None:
    weight = parameter()
    optimizer = bitsandbytes.optim.AdamW([weight], **asked)
    with pytest.raises(UserError, match=f"^AdamW: .*{reason}"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    before_it_moved = bitsandbytes.optim.AdamW([nn.Parameter(torch.ones(2))], **asked)
    with pytest.raises(UserError, match=f"^AdamW: .*{reason}"):
        loops.new_accelerator().prepare_optimizer(before_it_moved)


def test_one_with_a_kernel_of_metal_s_own_is_let_be() -> None:
    library = torch.library.Library("bitsandbytes", "IMPL")  # the watched way: the fallback gives its place up
    try:
        library.impl("optimizer_update_8bit_blockwise", lambda *args: None, "MPS")
        assert "8-bit" not in guards.get("cuda-optimizer").applies().reason
        bitsandbytes.optim.Adam8bit([parameter()])
    finally:
        library._destroy()
        registration.sweep()
    assert "8-bit" in guards.get("cuda-optimizer").applies().reason


def test_on_the_cpu_nothing_is_refused() -> None:
    bitsandbytes.optim.Adam8bit([nn.Parameter(torch.ones(2))]).step()
