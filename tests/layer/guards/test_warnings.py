"""Hazards that nothing can cure from outside are told of, or refused, before they do harm."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.layer.guards import GuardNotice
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments import results
from tests.layer.guards.experiments.results import TALL, WIDE

up_to_2_13 = pytest.mark.skipif(torch_release() >= (2, 14), reason="2.14 looks up rows of tensors of that size rightly")


@up_to_2_13
def test_a_parameter_that_large_is_refused_before_it_is_trained() -> None:
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has 2,147,484,672 elements")):
        torch.optim.SGD([results.huge()])


@up_to_2_13
def test_it_is_refused_in_an_accelerate_loop_too() -> None:
    model = nn.Module()
    model.weight = results.huge()
    with pytest.raises(UserError, match="pytorch#188756"):
        loops.new_accelerator().prepare_model(model)


@up_to_2_13
def test_one_that_is_frozen_is_refused_too() -> None:
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has")):
        loops.new_accelerator().prepare_model(results.FrozenTable())


@up_to_2_13
def test_lightning_s_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With a limit of its own: Lightning moves a model back to the CPU in the end, where a huge one takes 8 GB.
    monkeypatch.setattr("hf_mps.layer.guards.numerics.indices.HUGE_LIMIT", 64)
    model = loops.bert()
    model.requires_grad_(False)
    model.classifier.bias.requires_grad_(True)
    pl = lightning_loops.library()
    with pytest.raises(UserError, match=re.escape("a parameter of shape [40, 16] has 640 elements")):
        lightning_loops.trainer(pl, tmp_path, max_steps=1).fit(lightning_loops.module(pl, model))


@up_to_2_13
def test_a_refusal_is_the_only_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardNotice)
        with pytest.raises(UserError):
            torch.optim.SGD([results.huge()])
