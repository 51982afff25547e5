"""A small training step and its time, for the benchmarks that switch something on and off around it.

Imports torch: whoever needs the device sets the environment first.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch


def training_step(*, clip: bool = False) -> Callable[[], None]:
    """Forward, backward, clipping where asked for, and update of a BERT of two layers on 8 sequences of 64 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    model = BertForSequenceClassification(config).to("mps").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(1000, (8, 64), device="mps")
    labels = torch.randint(2, (8,), device="mps")

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def timed(step: Callable[[], object], steps: int, clock: Callable[[], float] = perf_counter) -> float:
    """Milliseconds a step by `clock`, over `steps` of them, with the device's work done."""
    torch.mps.synchronize()
    start = clock()
    for _ in range(steps):
        step()
    torch.mps.synchronize()
    return (clock() - start) / steps * 1000
