"""bf16 and fp16 train where they can, and are refused in one sentence where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from tests import hazards
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments import results

NEEDS = "fp16 cannot be used on mps: it needs accelerate 1.11 or newer; this is "


@pytest.fixture
def accelerate_1_10() -> Iterator[None]:
    """An accelerate that has no fp16 on mps."""
    with hazards.on("half-precision"):
        yield


@pytest.fixture
def fp16() -> None:
    """Skips where accelerate itself has neither on mps (1.10)."""
    results.needs_fp16()


@pytest.mark.usefixtures("accelerate_1_10")
def test_training_arguments_say_what_fp16_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^fp16=True: {NEEDS}[\d.]+; next: bf16"):
        TrainingArguments(str(tmp_path), fp16=True)


@pytest.mark.usefixtures("accelerate_1_10")
def test_accelerate_says_it_too_and_can_be_asked_again() -> None:
    with pytest.raises(UserError, match=f"^mixed_precision=fp16: {NEEDS}"):
        loops.new_accelerator(mixed_precision="fp16")
    from accelerate import Accelerator

    assert Accelerator(mixed_precision="no").mixed_precision == "no"


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_s_autocast_is_metal_s(precision: str, tmp_path: Path) -> None:
    pl = lightning_loops.library()
    plugin = lightning_loops.trainer(pl, tmp_path, precision=precision).precision_plugin
    assert plugin.device == "mps"
    assert (plugin.scaler is None) == (precision == "bf16-mixed")


def test_one_whose_autocast_is_cuda_s_is_given_metal_s(tmp_path: Path) -> None:
    """As Lightning before 2.6 has it."""
    pl = lightning_loops.library()
    module: Any = __import__(f"{pl.__name__}.trainer.connectors.accelerator_connector", fromlist=["x"])
    old = type("Old", (), {"_precision_flag": "16-mixed", "_accelerator_flag": "mps"})()
    cuda = module.MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))
    plugin = guards.get("half-precision")._plugin(lambda connector: cuda, old)
    assert (plugin.device, plugin.scaler._device) == ("mps", "mps")
    assert "would ask CUDA for it" in guards.get("half-precision").lines[0]


@pytest.mark.usefixtures("fp16")
def test_what_can_be_had_trains(tmp_path: Path) -> None:
    for name in ("bf16", "fp16"):
        loops.trained(tmp_path, max_steps=1, **{name: True})
    assert not guards.get("half-precision").times
