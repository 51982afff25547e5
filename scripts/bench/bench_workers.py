"""What a loader's workers cost to start: forked, started anew, and as the guard fork-workers has Trainer start them.

    python scripts/bench/bench_workers.py
    python scripts/bench/bench_workers.py --workers 4 --rounds 5

Loaders over tokenized rows with transformers' collator are read through one after the other, as Trainer makes one for
each epoch and each evaluation. Stock forks its workers; "spawn" starts each anew, and each imports torch, transformers
and datasets; the server (multiprocessing's forkserver, hf_mps/layer/guards/platform/fork_server.py) imports them once.
All four ways alternate in one process; the first loader of each, which starts the server, stands apart. The ratio is to
fork.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import measured_on
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import default_data_collator

ROWS, BATCH = 64, 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a loader's workers cost to start.")
    parser.add_argument("--workers", type=int, default=2, help="of a loader (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="loaders of each kind after the first (default %(default)s)"
    )
    given = parser.parse_args()
    print(measured_on.line("cpu"))
    from hf_mps.layer.guards.platform import fork_server
    from hf_mps.layer.guards.platform.fork_server import sent

    rows = Dataset.from_list([{"input_ids": [number] * 16, "labels": number % 2} for number in range(ROWS)])
    fork_server.start(sent(loader(rows, given.workers, "fork")).modules)
    ways: dict[str, Any] = {"none": None, "fork": "fork", "spawn": "spawn", "server": fork_server.Workers()}
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds + 1):
        for name, context in ways.items():
            started = time.perf_counter()
            batches = list(loader(rows, given.workers if context is not None else 0, context))
            took[name].append(time.perf_counter() - started)
            assert len(batches) == ROWS // BATCH
    print(f"{given.workers} workers, {ROWS // BATCH} batches; medians of {given.rounds} loaders, in seconds")
    print(f"{'':<10}{'first':>10}{'later':>10}{'of fork':>10}")
    later = {name: statistics.median(seconds[1:]) for name, seconds in took.items()}
    for name, seconds in took.items():
        print(f"{name:<10}{seconds[0]:>10.3f}{later[name]:>10.3f}{later[name] / later['fork']:>10.2f}")


def loader(rows: Any, workers: int, context: Any) -> DataLoader[Any]:
    """A loader as Trainer makes it."""
    return DataLoader(
        rows,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=default_data_collator,
        multiprocessing_context=context,
    )


if __name__ == "__main__":
    main()
