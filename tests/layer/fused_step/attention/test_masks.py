"""A mask is asked a block at a time: what transformers describes by a function is never made whole unasked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from hf_mps.layer.fused_step.attention.interface import mask
from hf_mps.layer.fused_step.attention.masks import Shape, Span, UnmadeMask, cut, span_of

LENGTH = 48


def packed() -> Any:
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None].expand(2, -1).to("mps")
    ids = masking_utils.find_packed_sequence_indices(positions)
    within = masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, positions)
    return masking_utils.and_masks(within, masking_utils.packed_sequence_mask_function(ids))


def functions() -> dict[str, Any]:
    return {
        "causal": masking_utils.causal_mask_function,
        "bidirectional": masking_utils.bidirectional_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(9),
        "sliding both ways": masking_utils.sliding_window_bidirectional_mask_function(7),
        "chunked": masking_utils.chunked_causal_mask_function(12, torch.zeros(2, dtype=torch.long, device="mps")),
        "packed": packed(),
        "or": masking_utils.or_masks(
            masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(3), lambda b, h, q, k: k < 4
        ),
    }


SPANS = {
    "causal": Span(after=0),
    "bidirectional": Span(),
    "sliding": Span(8, 0),
    "sliding both ways": Span(7, 7),
    "chunked": Span(11, 0),
    "packed": Span(after=0),
    "or": Span(),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "offset"), [(n, o) for n in SPANS for o in (0, 5) if n != "packed" or not o])
def test_blocks_of_a_mask_are_transformers_own(name: str, offset: int, padded: bool) -> None:
    padding = torch.ones(2, LENGTH, dtype=torch.bool, device="mps")
    padding[0, 30:], padding[1, :4] = False, False
    described = {
        **{"batch_size": 2, "q_length": LENGTH - offset, "kv_length": LENGTH, "q_offset": offset},
        **{"mask_function": functions()[name], "attention_mask": padding if padded else None},
        **{"allow_is_causal_skip": False, "device": torch.device("mps")},
    }
    whole = masking_utils.sdpa_mask(**described)
    unmade = mask(**described)
    assert isinstance(unmade, UnmadeMask)
    assert unmade.shape == whole.shape
    seen = torch.zeros_like(whole)
    shape = Shape(2, 1, 1, LENGTH - offset, LENGTH)
    for block in cut(shape, unmade.indexed.span, 4 * 200):
        of_block = unmade.indexed.block(block, torch.device("mps"))
        seen[block] = True if of_block is None else of_block
    assert torch.equal(seen, whole)


@pytest.mark.parametrize(("name", "span"), SPANS.items())
def test_what_a_function_allows_at_most_is_read_from_it(name: str, span: Span) -> None:
    assert span_of(functions()[name]) == span


def test_a_mask_takes_no_memory_until_a_model_computes_with_it() -> None:
    before = torch.mps.current_allocated_memory()
    unmade = mask(
        batch_size=2,
        q_length=2048,
        kv_length=2048,
        mask_function=masking_utils.sliding_window_causal_mask_function(64),
        local_size=64,
        device="mps",
    )
    assert isinstance(unmade, UnmadeMask)
    assert torch.mps.current_allocated_memory() - before < 2**16
    few = unmade[:, :, :8, :8]
    assert type(few) is torch.Tensor
    assert torch.equal(few.cpu()[0, 0], torch.ones(8, 8, dtype=torch.bool).tril())


def test_a_call_that_the_layers_own_rule_describes_has_no_mask() -> None:
    causal = {"batch_size": 1, "q_length": 8, "kv_length": 8, "device": "mps"}
    assert mask(**causal, mask_function=masking_utils.causal_mask_function) is None
    sliding = masking_utils.sliding_window_causal_mask_function(16)
    assert mask(**causal, mask_function=sliding, local_size=16) is None
    assert isinstance(mask(**causal, mask_function=sliding, local_size=4), UnmadeMask)


def test_functions_that_are_not_of_indices_get_transformers_own_tensor() -> None:
    whole = mask(
        batch_size=1,
        q_length=4,
        kv_length=4,
        mask_function=lambda b, h, q, k: torch.where(k > q, False, True),
        allow_is_causal_skip=False,
        use_vmap=True,
        device="mps",
    )
    assert type(whole) is torch.Tensor
    assert torch.equal(whole[0, 0].cpu(), torch.ones(4, 4, dtype=torch.bool).tril())
