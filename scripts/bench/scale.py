"""What a training on streamed rows costs up to a trillion tokens and 256 ranks, from what this machine measures.

    python scripts/bench/scale.py
    python scripts/bench/scale.py --parameters 7e9 --device-tokens 12000

Measured here, each in seconds: reading and mixing rows, tokenising them, writing a checkpoint with
torch.distributed.checkpoint, the places of a reader in a checkpoint. Given, not measured: the tokens per second of a
device (by default 40 % of an H100's 790 TFLOP/s in bf16 at six operations a weight and token) and the network's rate.
The dealing of the corpus is simulated with the readers' own function, at every number of ranks. Prints tables in
Markdown and what is used up first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import corpus

from hf_mps.finetune.stream import batches, files, lanes, units, windows

RANKS = (1, 8, 64, 256)
TOKENS = (1e9, 1e11, 1e12)
SECONDS = 4.0
"""Of each measurement, about."""


@dataclass(frozen=True)
class Constants:
    """Measured on one core each, `written` on this disk. Rates are per second, `state` is in bytes a reader."""

    read: float
    tokens: float
    bytes_of_token: float
    written: float
    state: int


def main() -> None:
    """Measure, compute and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=1.1e9, help="of the model (default %(default)g)")
    parser.add_argument("--device-tokens", type=float, help="tokens a second of one device")
    parser.add_argument("--network", type=float, default=50e9, help="bytes a second of a rank's link (%(default)g)")
    parser.add_argument("--workers", type=int, default=2, help="of each rank (default %(default)s)")
    parser.add_argument("--step-tokens", type=int, default=16_384, help="of a rank in a step (default %(default)s)")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="hf-mps-scale-") as place:
        found = measured(Path(place))
    device = given.device_tokens or 0.4 * 790e12 / (6 * given.parameters)
    print("| measured | figure |\n| --- | --- |")
    print(f"| rows read and mixed by one worker | {found.read / 1e6:,.0f} MB/s |")
    print(f"| tokens made by one worker | {found.tokens:,.0f}/s, {found.bytes_of_token:.1f} bytes of file each |")
    print(f"| torch.distributed.checkpoint to this disk | {found.written / 1e6:,.0f} MB/s a rank |")
    print(f"| a reader's place in a checkpoint | {found.state / 1e3:,.1f} kB |\n")
    per_step(given, found, device)
    whole(given, found, device)
    dealing(given, found)
    first(given, found, device)


def measured(folder: Path) -> Constants:
    """Measure the constants in `folder`."""
    import torch
    from torch.distributed import checkpoint
    from transformers import AutoTokenizer

    corpus.model(folder / "model", layers=1, width=64)
    corpus.write(folder / "rows", 300_000_000)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    found = files.of_pattern(str(folder / "rows" / "*.jsonl"), "data")
    reading = lanes.Reading((lanes.Corpus(found),), {"text": "text"}, ("text",), 1, hold_out=0.001)
    mixed = iter(windows.Windows(lanes.Lane(reading, 0, 1), 10_000, 1))
    next(mixed)
    # Seconds of this process's own core: whoever else computes here slows nothing of what is measured.
    clock = time.process_time
    count, began = 0, clock()
    while clock() - began < SECONDS:
        count += sum(len(row["text"]) for row in islice(mixed, 1000))
    read = count / (clock() - began)
    tokens, letters, spent = 0, 0, 0.0
    while spent < SECONDS:
        some = [row["text"] for row in islice(mixed, 100)]
        began = clock()
        tokens += sum(map(len, tokenizer(some, verbose=False)["input_ids"]))
        spent += clock() - began
        letters += sum(map(len, some))
    made = tokens / spent

    def encode(some: Any) -> list[Any]:
        return [[{"input_ids": ids}] for ids in tokenizer([row["text"] for row in some], verbose=False)["input_ids"]]

    making = batches.Making(encode, 1024, joined=True)
    lane = batches.Batches(windows.Windows(lanes.Lane(reading, 0, 1), 1000, 1), making, batches.Arranging(16))
    state = [len(json.dumps(batch.state)) for batch in islice(lane, 9) if batch.state]
    weights = {f"weight{number}": torch.randn(25_000_000) for number in range(6)}  # 600 MB
    began = time.perf_counter()
    checkpoint.save(weights, checkpoint_id=str(folder / "checkpoint"), no_dist=True)
    os.sync()
    written = 600e6 / (time.perf_counter() - began)
    return Constants(read, made, letters / tokens, written, max(state))


def per_step(given: argparse.Namespace, found: Constants, device: float) -> None:
    """Print what one step costs a rank."""
    compute = given.step_tokens / device
    print(
        f"A step of {given.step_tokens:,} tokens a rank computes {compute:.2f} s, at {device:,.0f} tokens/s a device.\n"
    )
    print(
        "| ranks | files read | tokenised | gradients reduced (DDP, bf16) | FSDP2 | network, if none of it is hidden |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in RANKS:
        share = (ranks - 1) / ranks
        reduced, sharded = 2 * share * 2 * given.parameters, 3 * share * 2 * given.parameters
        print(
            f"| {ranks} | {given.step_tokens * found.bytes_of_token * ranks / 1e6:,.2f} MB"
            f" | {given.step_tokens * ranks:,} tokens | {reduced / 1e9:.1f} GB a rank | {sharded / 1e9:.1f} GB a rank"
            f" | {reduced / given.network:.2f} s DDP, {sharded / given.network:.2f} s FSDP2 |"
        )
    print()


def whole(given: argparse.Namespace, found: Constants, device: float) -> None:
    """Print what a whole training costs."""
    print(
        "| tokens | ranks | corpus | days of computing | pieces of 64 MiB | of them a reader | checkpoint | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for tokens in TOKENS:
        for ranks in RANKS:
            size = tokens * found.bytes_of_token
            readers = ranks * given.workers
            pieces = max(1, round(size / units.SPAN))
            # Weights in bfloat16, their float32 copies and Adam's two moments, each rank its share.
            saved = given.parameters * (2 + 4 + 8) + readers * found.state
            seconds = saved / ranks / found.written
            print(
                f"| {tokens:.0e} | {ranks} | {size / 1e12:,.3f} TB | {tokens / device / ranks / 86400:,.2f}"
                f" | {pieces:,} | {pieces / readers:,.1f} | {saved / 1e9:.1f} GB | {seconds:,.1f} |"
            )
    print()


def dealing(given: argparse.Namespace, found: Constants) -> None:
    """Simulate who reads how much of a pass over 1e11 tokens whose files are of very different sizes."""
    draw = random.Random(0)
    sizes = [draw.lognormvariate(0, 0.5) for _ in range(round(1e11 * found.bytes_of_token / units.SPAN))]
    print("| readers | least and most of a pass, of the mean | pieces of 1,000 | of 100: rows read, of those kept |")
    print("| --- | --- | --- | --- |")
    for ranks in RANKS:
        readers = ranks * given.workers

        def spread(count: int, readers: int = readers) -> tuple[float, float]:
            held = [
                sum(sizes[unit] / share.readers for unit in share.units)
                for share in (units.share(count, lane, readers, "1/0/0") for lane in range(readers))
            ]
            mean = sum(held) / readers
            return min(held) / mean, max(held) / mean

        many, few = spread(len(sizes)), spread(1000)
        twice = max(1.0, readers / 100)
        print(f"| {readers} | {many[0]:.2f}, {many[1]:.2f} | {few[0]:.2f}, {few[1]:.2f} | {twice:.1f} times |")
    print()


def first(given: argparse.Namespace, found: Constants, device: float) -> None:
    """Print what is used up first, by how far it is."""
    needed = device / found.tokens
    scanned = 1000 / 0.001
    letters = 2_000
    most = given.network / (2 * 2 * given.parameters)
    print(f"- Tokenising: a device takes {device:,.0f} tokens/s, {needed:.2f} workers' whole time each.")
    print(f"- Reading: {device * found.bytes_of_token / found.read:.3f} workers' whole time a device.")
    print(
        f"- The network: DDP's gradients take as long as {device / most:,.0f} tokens a rank compute, however many ranks"
        " there are; FSDP2's traffic half as long again."
    )
    print(
        f"- The start: 1,000 validation rows held out of a share of 0.001 are found among {scanned:,.0f} rows,"
        f" {scanned * letters / found.read:,.0f} s of reading {scanned * letters / 1e9:.0f} GB on every rank; a file of"
        " their own takes none."
    )
    readers = 256 * given.workers
    enough = readers * units.SPAN / 1e9
    print(
        f"- Pieces: {readers:,} readers want as many ({enough:,.0f} GB of lines); of fewer, several read the same one."
    )
    print(f"- Places in a checkpoint: {readers * found.state / 1e6:,.1f} MB of 256 ranks, a file for each rank.")
    print(f"- Memory of a reader: two windows of rows, at most {2 * windows.BYTES / 2**20:.0f} MiB of letters.")


if __name__ == "__main__":
    main()
