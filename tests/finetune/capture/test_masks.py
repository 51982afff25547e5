"""A batch without padding goes without its mask; where one is needed, or the model is no text model, it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, masking_utils

from hf_mps.finetune.capture import masks

IDS, FULL = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
PADDED = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
@pytest.mark.parametrize(("mask", "stays"), [(FULL, False), (PADDED, True), (FULL[:, None, :, None], True)])
def test_a_mask_that_hides_nothing_is_left_out(kind: Any, mask: torch.Tensor, stays: bool) -> None:
    batch = masks.Unmasked(lambda rows: kind({"input_ids": IDS, "attention_mask": mask}))([])
    assert type(batch) is kind
    assert ("attention_mask" in batch) is stays


def test_another_models_mask_stays() -> None:
    batch = masks.Unmasked(lambda rows: {"input_values": IDS.float(), "attention_mask": FULL})([])
    assert "attention_mask" in batch


def test_transformers_is_as_before_afterwards() -> None:
    stock = masking_utils.is_tracing
    with masks.none_is_none():
        assert masking_utils.is_tracing() is False
        assert masking_utils.is_tracing is not stock
    assert masking_utils.is_tracing is stock


def test_without_a_mask_a_model_computes_what_it_does_with_one_that_hides_nothing() -> None:
    from tests.finetune.capture.recorders import model

    made = model().eval()
    ids = torch.randint(5, 50, (2, 8))
    with torch.no_grad():
        with_one = made(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        with masks.none_is_none():
            without = made(input_ids=ids).logits
    assert torch.equal(with_one, without)
