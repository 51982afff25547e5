"""Optimizers of bitsandbytes: those that cannot run on Metal are refused in one line, those that can are let be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hf_mps import guards
from hf_mps.core.errors import UserError
from hf_mps.guards.platform.cuda_optimizer import UPDATES
from tests.guards import loops


class Optimizer8bit(torch.optim.SGD):
    """Made as bitsandbytes 0.50 makes its own: on top of torch's, and what it is stands in it when all is over."""

    __module__ = "bitsandbytes.optim.optimizer"

    def __init__(self, parameters: Any, *, optim_bits: int = 32, is_paged: bool = False) -> None:
        super().__init__(parameters, lr=0.1)
        self.args = type("Arguments", (), {"optim_bits": optim_bits})
        self.is_paged = is_paged

    def get_state_buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.numel() >= 1e5 and self.is_paged:
            raise RuntimeError("Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.")
        return torch.zeros_like(parameter)


AdamW = type("AdamW", (Optimizer8bit,), {"__module__": "bitsandbytes.optim.adamw"})
Adam8bit = type("Adam8bit", (Optimizer8bit,), {"__module__": "bitsandbytes.optim.adam"})
GaLoreAdamW8bit = type("GaLoreAdamW8bit", (Optimizer8bit,), {"__module__": "galore_torch.adamw8bit"})


@pytest.fixture
def kernels() -> Iterator[Any]:
    """As much of bitsandbytes 0.50 as is looked at; `kernels(bits, key)` adds a kernel."""
    if find_spec("bitsandbytes") is not None:
        pytest.skip("the real bitsandbytes is installed")
    names = ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer")
    # What torch.library.Library wraps: hf_mps's fallback does not notice operators that are defined here.
    library: Any = torch._C._dispatch_library("DEF", "bitsandbytes", "", __file__)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            module: Any = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.Optimizer8bit = Optimizer8bit
            patch.setitem(sys.modules, name, module)
        for name in UPDATES.values():
            library.define(f"{name.partition('::')[2]}(Tensor p) -> ()", "")
        library.impl(UPDATES[8], "CPU", lambda p: None)
        library.impl(UPDATES[32], "CompositeExplicitAutograd", lambda p: None)
        yield lambda bits, key: library.impl(UPDATES[bits], key, lambda p: None)
    library.reset()


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2, device="mps"))
    made.grad = torch.ones_like(made)
    return made


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_without_bitsandbytes_trainer_s_name_is_refused_before_anything_is_done(optim: str, tmp_path: Path) -> None:
    reason = (
        f"^optim={optim}: bitsandbytes is not installed, .*; next: adamw_torch, or Adafactor where memory is short$"
    )
    with pytest.raises(UserError, match=reason):
        loops.trainer(tmp_path, optim=optim)


def test_one_that_would_train_keeps_transformers_words(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="install `bitsandbytes`"):
        loops.trainer(tmp_path, optim="lion_32bit").train()


@pytest.mark.usefixtures("kernels")
def test_one_of_32_bits_has_a_kernel_for_every_device(tmp_path: Path) -> None:
    weight = parameter()
    AdamW([weight]).step()
    assert weight.tolist() == pytest.approx([0.9, 0.9])
    loops.new_accelerator().prepare_optimizer(AdamW([nn.Parameter(torch.ones(2))]))
    loops.trainer(tmp_path, optim="rmsprop_bnb")
    assert not guards.get("cuda-optimizer").times


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [Adam8bit, GaLoreAdamW8bit])
def test_one_of_8_bits_is_refused_when_it_is_made(kind: Any) -> None:
    with pytest.raises(UserError, match=r"8bit: the installed bitsandbytes has no kernel of 8-bit .*next: torch.optim"):
        kind([parameter()], optim_bits=8)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("asked", "reason"), [({"optim_bits": 8}, "no kernel of 8-bit optimizers"), ({"is_paged": True}, "managed memory")]
)
def test_one_that_is_asked_for_by_an_argument_is_before_its_first_step(asked: dict[str, Any], reason: str) -> None:
    weight = parameter()
    optimizer = AdamW([weight], **asked)
    with pytest.raises(UserError, match=f"^AdamW: .*{reason}"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    before_it_moved = AdamW([nn.Parameter(torch.ones(2))], **asked)
    with pytest.raises(UserError, match=f"^AdamW: .*{reason}"):
        loops.new_accelerator().prepare_optimizer(before_it_moved)


def test_one_with_a_kernel_of_metal_s_own_is_let_be(kernels: Any) -> None:
    assert "8-bit" in guards.get("cuda-optimizer").applies().reason
    kernels(8, "MPS")
    assert "8-bit" not in guards.get("cuda-optimizer").applies().reason
    Adam8bit([parameter()], optim_bits=8).step()


@pytest.mark.usefixtures("kernels")
def test_on_the_cpu_nothing_is_refused() -> None:
    Adam8bit([nn.Parameter(torch.ones(2))], optim_bits=8, is_paged=True).step()
