"""`use_kernels=True` of transformers, where a model trains on mps: the plain Trainer's losses by kernels of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import hub_kernels
from transformers.utils import import_utils

from hf_mps.core.choice import Choice
from hf_mps.layer.fused_step import switch
from tests.layer.fused_step import families

KERNELS = import_utils.is_kernels_available()
STEPS = 20


def bound(model: Any, mode: Any = None) -> None:
    """Give layers their class's forward, as kernels does where it has no other (kernels/layer/layer.py)."""
    for each in model.modules():
        if type(each).__name__ in ("LlamaRMSNorm", "SiLUActivation"):
            each.forward = MethodType(type(each).forward, each)
    model._use_kernels = True


@pytest.fixture(autouse=True)
def _no_longer_than_a_test() -> Iterator[None]:
    with switch.running(Choice(switch.OFF, "a test"), "mps"):
        yield


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package kernels, or what it does without the hub."""
    if not KERNELS:
        for place in (import_utils, transformers.modeling_utils):
            monkeypatch.setattr(place, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "register_kernel_mapping_transformers", lambda: None)
        monkeypatch.setattr(transformers.modeling_utils, "kernelize", bound)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=families.WORDS, max_position_embeddings=families.LENGTH, **families.SHAPE)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trained(saved: Path, use_kernels: bool) -> families.Counts:
    _, rows = families.made("decoder with LoRA")
    model = LlamaForCausalLM.from_pretrained(saved, use_kernels=use_kernels)
    how = {"logging_steps": 1, "learning_rate": 1e-3}
    return families.train((model, rows), saved.parent, steps=STEPS - families.WARM - 1, **how)


@pytest.mark.usefixtures("_kernels")
def test_losses_are_the_plain_trainers_in_fewer_launches(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trained(saved, use_kernels=False)
    assert not any(part.on for part in switch.parts())
    found = trained(saved, use_kernels=True)
    assert [len(each.losses) for each in (plain, found)] == [STEPS] * 2
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(plain.losses), rtol=1e-5, atol=1e-5)
    assert found.counted.launches < 0.63 * plain.counted.launches
    assert capsys.readouterr().err.count("use_kernels=True: training steps on mps launch less") == 1


@pytest.mark.usefixtures("_kernels")
def test_who_wants_no_fused_step_has_none(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_FUSED_STEP", "0")
    LlamaForCausalLM.from_pretrained(saved, use_kernels=True)
    assert not any(part.on for part in switch.parts())


@pytest.mark.skipif(KERNELS, reason="the package kernels is there")
def test_without_the_package_kernels_transformers_says_so_and_nothing_changes(saved: Path) -> None:
    with pytest.raises(ValueError, match="Kernels are not available"):
        LlamaForCausalLM.from_pretrained(saved, use_kernels=True)
    assert not any(part.on for part in switch.parts())
