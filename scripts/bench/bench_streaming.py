"""Streamed rows: memory while a corpus larger than it is read, tokens per second, and how long the training waited.

    python scripts/bench/bench_streaming.py                                      1 GB, minutes
    python scripts/bench/bench_streaming.py --gigabytes 20 --steps 2000          the figures of docs/scale.md

A corpus (scripts/bench/corpus.py) is written into a temporary folder and removed at the end. `rows` reads and mixes all
of it without a model, through the readers of a run with two workers. `memory` is a run over it: the memory of its
process and its workers together (PSS, which counts a shared page once), by how much it grew after the first minute.
`rate` trains a part of it in turn streamed, loaded whole, and by the usual way beside ours (datasets' own streaming,
shuffle, map and the stock Trainer): tokens per second of the steps after the first ten, and of ours the share of the
time that the training stood still for a batch. Ratios are of one run of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpus
import measured_on
import psutil

HERE = Path(__file__).resolve()
WARM = 10
EVERY = 2.0
"""Seconds between two looks at the memory."""
MINUTE = 60.0


@dataclass
class Memory:
    """What a process and its children held, in bytes, by the second."""

    looks: list[tuple[float, int]] = field(default_factory=list)
    begun: float | None = None
    """The second in which the first step was printed, or for a program without steps its start."""

    def look(self, seconds: float, process: psutil.Process) -> None:
        """Take one more look."""
        try:
            held = sum(one.memory_full_info().pss for one in [process, *process.children(recursive=True)])
        except psutil.Error:  # one of them ended meanwhile
            return
        self.looks.append((seconds, held))

    def __str__(self) -> str:
        begun = self.begun or 0.0
        later = [held for seconds, held in self.looks if seconds >= begun + MINUTE]
        if not later:
            return "ended within its first minute"
        first = max(held for seconds, held in self.looks if begun <= seconds < begun + MINUTE)
        growth, second = ((max(some) - first) / 1e6 for some in (later, later[len(later) // 2 :]))
        return (
            f"at most {first / 1e6:,.0f} MB in the first minute, {growth:+,.0f} MB after it, {second:+,.0f} MB in the"
            f" second half of {(self.looks[-1][0] - begun) / 60:.1f} minutes"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the corpus (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of the run whose memory is looked at")
    parser.add_argument("--rate-steps", type=int, default=120, help="of each run whose rate is taken; 0: none")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a block")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--inside", choices=("rows", "stock"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        {"rows": _rows, "stock": _stock}[given.inside](given)
        return
    print(measured_on.line("cpu"))
    with tempfile.TemporaryDirectory(prefix="hf-mps-corpus-", dir=given.folder) as place:
        folder = Path(place)
        corpus.model(folder / "model", layers=given.layers, width=given.width)
        began = time.perf_counter()
        files = corpus.write(folder / "all", round(given.gigabytes * 1e9))
        print(f"corpus: {len(files)} files, {given.gigabytes:g} GB, written in {time.perf_counter() - began:.0f} s")
        _whole(given, folder)
        if given.rate_steps:
            _rates(given, folder)


def _whole(given: argparse.Namespace, folder: Path) -> None:
    """Read all rows; then train on the corpus for `steps` steps."""
    memory = Memory()
    seen = json.loads(_run(_self(given, "rows", folder), folder, memory).splitlines()[-1])
    rate = seen["bytes"] / seen["seconds"] / 1e6
    print(f"rows: {seen['rows']:,} rows, {seen['bytes'] / 1e9:.1f} GB read and mixed at {rate:,.0f} MB/s; {memory}")
    memory = Memory()
    _run(_recipe(given, folder, "memory", given.steps, streaming=True), folder, memory)
    found = json.loads((folder / "memory" / "results.json").read_text(encoding="utf-8"))
    stream = found["stream"]
    print(
        f"memory: {stream['tokens']:,} tokens, {stream['rows_read']:,} rows; {memory}; waited"
        f" {stream['waited_share']:.1%} of the training, {stream['first_batch_seconds']:.1f} s for the first batch"
    )


def _rates(given: argparse.Namespace, folder: Path) -> None:
    """Train the same rows in three ways, in turn."""
    tokens = given.rate_steps * given.batch * given.length
    corpus.write(folder / "part", round(tokens * 2.5), file=max(2**20, tokens // 2))
    rates: dict[str, list[float]] = {"streamed": [], "loaded whole": [], "datasets + stock Trainer": []}
    waits = []
    for number in range(given.rounds):
        for streaming, way in ((True, "streamed"), (False, "loaded whole")):
            name = f"{way.replace(' ', '-')}-{number}"
            _run(_recipe(given, folder, name, given.rate_steps, streaming=streaming, part=True), folder, Memory())
            found = json.loads((folder / name / "results.json").read_text(encoding="utf-8"))
            rates[way].append(given.rate_steps * given.batch * given.length / found["train_seconds"])
            if streaming:
                waits.append(found["stream"]["waited_share"])
        stock = _run(_self(given, "stock", folder), folder, Memory())
        rates["datasets + stock Trainer"].append(float(stock.splitlines()[-1]))
    base = statistics.median(rates["loaded whole"])
    print(f"{'rate':<26}{'tokens/s':>12}{'of whole':>10}   medians of {given.rounds}, {given.workers} workers")
    for way, found_rates in rates.items():
        print(f"{way:<26}{statistics.median(found_rates):>12,.0f}{statistics.median(found_rates) / base:>10.2f}")
    print(f"waited: {statistics.median(waits):.1%} of the training")


def _recipe(
    given: argparse.Namespace, folder: Path, name: str, steps: int, *, streaming: bool, part: bool = False
) -> list[str]:
    """Write a recipe and return the command that runs it."""
    files = str(folder / ("part" if part else "all") / "*.jsonl")
    data: dict[str, Any] = {"streaming": True, "files": {"train": files}, "rows": {"validation": 20}}
    workers = given.workers
    if not streaming:
        joined = folder / "whole.jsonl"
        if not joined.exists():
            joined.write_bytes(b"".join(path.read_bytes() for path in sorted((folder / "part").iterdir())))
        data, workers = {"files": {"train": str(joined)}, "rows": {"validation": 20}}, 0
    data["hold_out"] = 0.05 if part else 0.001
    training = {"max_steps": steps, "per_device_train_batch_size": given.batch, "dataloader_num_workers": workers}
    training |= {"logging_steps": max(1, steps // 10), "save_strategy": "no", "eval_strategy": "no"}
    recipe = {"task": "causal-lm", "model": str(folder / "model"), "max_length": given.length, "data": data}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe | {"output_dir": str(folder / name), "training": training}), encoding="utf-8")
    return [sys.executable, "-m", "hf_mps.finetune", str(path)]


def _self(given: argparse.Namespace, inside: str, folder: Path) -> list[str]:
    words = [sys.executable, str(HERE), "--inside", inside, "--folder", str(folder)]
    for name in ("rate_steps", "batch", "length", "workers"):
        words += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    return words


def _run(command: list[str], folder: Path, memory: Memory) -> str:
    """Run a command to its end, looking at its memory; return what it printed."""
    # One thread each: where others compute too, threads that wait for each other stand still for most of the time.
    variables = {"HF_MPS_DEVICE": "cpu", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | dict(os.environ)
    with (
        (folder / "out").open("w+", encoding="utf-8") as out,
        subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT, text=True) as running,
    ):
        began, process = time.perf_counter(), psutil.Process(running.pid)
        while running.poll() is None:
            memory.look(time.perf_counter() - began, process)
            if memory.begun is None and "\nstep " in (folder / "out").read_text(encoding="utf-8"):
                memory.begun = time.perf_counter() - began
            time.sleep(EVERY)
        out.seek(0)
        said = out.read()
    if running.returncode:
        raise SystemExit(f"{' '.join(command)}\n{said}")
    return said


def _rows(given: argparse.Namespace) -> None:
    """Read all rows of the corpus once, as a run's workers do, without a model."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    from hf_mps.finetune.stream import endless, files

    found = files.of_pattern(str(given.folder / "all" / "*.jsonl"), "data")
    reading = endless.Reading((endless.Corpus(found),), {"text": "text"}, ("text",), 1, hold_out=0.001)

    class Rows(IterableDataset[int]):
        def __iter__(self) -> Any:
            info = get_worker_info()
            reader = endless.Reader(reading, info.id, info.num_workers)
            mixed = endless.Windows(reader, 10_000, 1)
            for number, _ in enumerate(mixed):
                if reader.places[0].passed:
                    return
                if number % 1000 == 999:
                    yield 1000

    began = time.perf_counter()
    rows = sum(DataLoader(Rows(), batch_size=None, num_workers=given.workers))
    size = sum(file.size for file in found)
    print(json.dumps({"rows": rows, "bytes": size, "seconds": time.perf_counter() - began}))


def _stock(given: argparse.Namespace) -> None:
    """Train as the documentation of datasets and transformers has it; print tokens per second."""
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    tokenizer = AutoTokenizer.from_pretrained(given.folder / "model")
    rows = load_dataset("json", data_files=str(given.folder / "part" / "*.jsonl"), split="train", streaming=True)

    def blocks(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = [one for text in tokenizer(batch["text"])["input_ids"] for one in text]
        cut = [ids[at : at + given.length] for at in range(0, len(ids) - given.length + 1, given.length)]
        return {"input_ids": cut, "labels": cut}

    stream = rows.shuffle(seed=42, buffer_size=10_000).map(blocks, batched=True, remove_columns=["text", "id"])
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=given.rate_steps,
            per_device_train_batch_size=given.batch,
            dataloader_num_workers=given.workers,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(given.folder / "model")
        Trainer(
            model, args, train_dataset=stream.repeat(None), data_collator=default_data_collator, callbacks=[Clock()]
        ).train()
    seconds = times[-1] - times[WARM]
    print((len(times) - 1 - WARM) * given.batch * given.length / seconds)


if __name__ == "__main__":
    main()
