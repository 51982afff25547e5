"""Hazards that nothing can cure from outside are told of, or refused, before they do harm."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.layer.guards import GuardNotice
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments import results
from tests.layer.guards.experiments.results import TALL, WIDE

up_to_2_13 = pytest.mark.skipif(torch_release() >= (2, 14), reason="2.14 looks up rows of tensors of that size rightly")


def of_an_optimizer() -> None:
    torch.optim.SGD([results.huge()])


def of_a_frozen_model() -> None:
    loops.new_accelerator().prepare_model(results.FrozenTable())


@up_to_2_13
@pytest.mark.parametrize("train", [of_an_optimizer, of_a_frozen_model])
def test_a_parameter_that_large_is_refused_in_one_line(train: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardNotice)
        with pytest.raises(UserError, match=rf"\[{TALL}, {WIDE}\] has 2,147,484,672 elements.*pytorch#188756"):
            train()


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
