"""A batch without padding goes without its mask; where one is needed, or the model is no text model, it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM, masking_utils

from hf_mps.finetune.cuda_graphs import graphs
from tests.finetune.cuda_graphs.recorders import model

IDS, FULL = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
PADDED = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
@pytest.mark.parametrize(("mask", "stays"), [(FULL, False), (PADDED, True), (FULL[:, None, :, None], True)])
def test_a_mask_that_hides_nothing_is_left_out(kind: Any, mask: torch.Tensor, stays: bool) -> None:
    batch = graphs.Unmasked(lambda rows: kind({"input_ids": IDS, "attention_mask": mask}))([])
    assert type(batch) is kind
    assert ("attention_mask" in batch) is stays


def test_another_models_mask_stays() -> None:
    batch = graphs.Unmasked(lambda rows: {"input_values": IDS.float(), "attention_mask": FULL})([])
    assert "attention_mask" in batch


def test_transformers_is_as_before_afterwards() -> None:
    stock = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    with graphs.as_they_are({}):
        assert masking_utils.is_tracing() is False
        assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None]) is None
    assert (masking_utils.is_tracing, masking_utils.find_packed_sequence_indices) == stock


def test_without_a_mask_a_model_computes_what_it_does_with_one_that_hides_nothing() -> None:
    made = model().eval()
    ids = torch.randint(5, 50, (2, 8))
    with torch.no_grad():
        with_one = made(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        with graphs.as_they_are({}):
            without = made(input_ids=ids).logits
    assert torch.equal(with_one, without)


@pytest.mark.parametrize("given", [False, True])
def test_sequences_that_share_a_row_stay_apart(given: bool) -> None:
    """Positions of the batch's own say where a sequence begins; those that the model makes say nothing."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64)).eval()
    batch = {"input_ids": torch.randint(5, 50, (1, 8))}
    if given:
        batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with torch.no_grad():
        stock = made(**batch).logits
        with graphs.as_they_are(batch):
            ours = made(**batch).logits
    torch.testing.assert_close(ours, stock)
