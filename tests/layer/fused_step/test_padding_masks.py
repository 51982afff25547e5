"""The mask of a padded batch in training: transformers' own bools, made by one look at the batch's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from hf_mps.layer.fused_step.model_code import CACHES
from hf_mps.metal import simulator
from tests.layer.fused_step import families
from tests.layer.fused_step.conftest import Fused

BATCH, PLACES = 3, families.LENGTH
CONFIG = BertConfig(attn_implementation="sdpa")


def given(**said: Any) -> dict[str, Any]:
    """A batch, whose last row is nothing but padding."""
    mask = torch.ones(BATCH, PLACES, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2] = 0
    embedded = torch.zeros(BATCH, PLACES, 8, device="mps")
    return {"config": CONFIG, "inputs_embeds": embedded, "attention_mask": mask.to("mps"), **said}


def counted(make: Any, **said: Any) -> tuple[Tensor | None, int]:
    arguments = given(**said)
    with simulator.counted() as counts:
        found = make(**arguments)
    return None if found is None else found.cpu(), counts.launches


def test_an_encoders_mask_is_transformers_own(fused: Fused) -> None:
    expected, before = counted(create_bidirectional_mask)
    with fused():
        found, after = counted(create_bidirectional_mask)
    assert torch.equal(found, expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert after <= 2 < before, "the bools, and the look whether there is padding"


def test_a_batch_without_padding_needs_none(fused: Fused) -> None:
    with fused():
        assert counted(create_bidirectional_mask, attention_mask=torch.ones(BATCH, PLACES, device="mps"))[0] is None


@pytest.mark.parametrize("case", ["causal", "evaluation", "a mask of one's own", "keys of another text"])
def test_other_masks_are_made_as_ever(case: str, fused: Fused) -> None:
    make = create_causal_mask if case == "causal" else create_bidirectional_mask
    cache = CACHES[CACHES[1] in inspect.signature(create_causal_mask).parameters]
    said: dict[str, Any] = {cache: None} if case == "causal" else {}
    if case == "a mask of one's own":
        said["and_mask_function"] = lambda batch, head, query, key: query >= key
    if case == "keys of another text":
        said["encoder_hidden_states"] = torch.zeros(BATCH, PLACES, 8, device="mps")
        said["inputs_embeds"] = torch.zeros(BATCH, 2, 8, device="mps")
    with torch.set_grad_enabled(case != "evaluation"):
        expected, before = counted(make, **said)
        with fused():
            found, after = counted(make, **said)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert after == before or case == "keys of another text"
