"""A training step with no missing operator, with the layer's fallback on and off: the ratio of their times.

    python scripts/bench_layer.py
    python scripts/bench_layer.py --rounds 40 --steps 4

One small BERT and one AdamW on the device; the kernels are registered and taken back between rounds of a few steps, in
alternation, so that a drift of the machine's speed falls on both. Prints the median of each, the ratio of neighbouring
rounds with its spread, and exits with 1 where the median ratio is further than 2 % from 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

os.environ.update({"HF_MPS_FALLBACK": "quiet", "HF_HUB_OFFLINE": "1"})
if sys.platform != "darwin":
    os.environ.setdefault("HF_MPS_SIMULATE", "1")

import torch


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80, help="pairs of rounds (default 80)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of a round (default 4)")
    given = parser.parse_args()
    from hf_mps import fallback
    from hf_mps.fallback import register

    torch.set_num_threads(1)
    step = training_step()
    for _ in range(3):
        step()
    with_layer, without = [], []
    for number in range(given.rounds):
        # Which of the two goes first changes, or a steady drift would count for one of them.
        for on in (True, False) if number % 2 else (False, True):
            (register.start if on else register.stop)()
            (with_layer if on else without).append(timed(step, given.steps))
    ratios = [on / off for on, off in zip(with_layer, without, strict=True)]
    ratio = statistics.median(ratios)
    quarters = statistics.quantiles(ratios, n=4)
    print(f"with the layer {statistics.median(with_layer):9.3f} ms a step")
    print(f"without it     {statistics.median(without):9.3f} ms a step")
    print(f"ratio          {ratio:9.4f}  (half of the rounds from {quarters[0]:.4f} to {quarters[2]:.4f})")
    missing = fallback.report().operators
    for entry in missing:
        print(f"not a step without missing operators: {entry.operator}")
    return 1 if missing or abs(ratio - 1) > 0.02 else 0


def training_step() -> Callable[[], None]:
    """Forward, backward and update of a BERT of two layers on 8 sequences of 64 tokens."""
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
        optimizer.step()

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Milliseconds a step."""
    torch.mps.synchronize()
    start = perf_counter()
    for _ in range(steps):
        step()
    torch.mps.synchronize()
    return (perf_counter() - start) / steps * 1000


if __name__ == "__main__":
    sys.exit(main())
