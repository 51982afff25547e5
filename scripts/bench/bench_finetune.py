"""Fine-tuning MRPC on the CPU: the runner against a run_glue-style script with the documentation's settings.

    python scripts/bench/bench_finetune.py --threads 2 --seeds 1,2,3 --out bench_finetune.json
    python scripts/bench/bench_finetune.py --learning-rate 5e-5 --epochs 4
    python scripts/bench/bench_finetune.py --steps 40                        # the ratio of the speeds alone

Both train the same model on the same files, batch 32, learning rate 2e-5, 3 epochs: scripts/examples/run_glue.py under
stock transformers (HF_MPS=0), every row padded to 128 as the examples' run_glue.py does by default, and
`python -m hf_mps.finetune glue/mrpc` as it comes. They take turns, a process each. Speed is what each says of its own
training: Trainer's train_samples_per_second and the runner's samples_per_second, evaluations in neither. Needs
../shared/data (or --data and --model) and no network. Exit code 1 where the runner trains less than 2 x the examples
per second, or its mean F1 is more than one point below.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured_on
import trainings


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=trainings.data_folder(), help="a folder with train.csv and dev.csv"
    )
    parser.add_argument(
        "--model", type=Path, default=trainings.minilm(), help="a model's folder (default: MiniLM from PyPI)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each training (default: all)")
    parser.add_argument("--seeds", default="1,2,3", help="default 1,2,3")
    parser.add_argument("--epochs", type=int, default=3, help="default 3")
    parser.add_argument("--learning-rate", default="2e-5", help="default 2e-5")
    parser.add_argument("--steps", type=int, help="so many steps of the first seed in place of epochs, and no F1")
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    device = measured_on.line("cpu")
    print(device, flush=True)
    runs: dict[str, list[dict[str, float]]] = {"run_glue": [], "hf_mps": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds[:1] if given.steps else seeds:
            for name, run in (("run_glue", script), ("hf_mps", recipe)):
                figures = run(given, seed, Path(folder) / f"{name}-{seed}")
                runs[name].append({"seed": seed, **figures})
                shown = "" if given.steps else f"   F1 {figures['f1']:.4f}   accuracy {figures['accuracy']:.4f}"
                speed, seconds = figures["samples_per_second"], figures["seconds"]
                print(f"{name:<9} seed {seed:<3}{speed:8.2f} examples/s{seconds:8.0f} s in all{shown}", flush=True)
    outcome = summary(runs, scored=not given.steps)
    if given.out:
        record = {
            "device": device,
            "threads": given.threads,
            "learning_rate": given.learning_rate,
            "epochs": given.epochs,
        }
        record |= {"steps": given.steps, **outcome, "runs": runs}
        given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"examples per second, hf_mps / run_glue   {outcome['ratio']:.2f}")
    for name, (mean, deviation) in outcome["f1"].items():
        print(f"mean F1, {name:<9} {mean:.4f} (deviation {deviation:.4f})")
    scores = outcome["f1"]
    worse = bool(scores) and scores["hf_mps"][0] < scores["run_glue"][0] - 0.01
    return 1 if outcome["ratio"] < 2 or worse else 0


def script(given: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """One training by scripts/examples/run_glue.py as the examples' README calls it."""
    words = trainings.run_glue(training(given, seed), folder, padded=True, more=("--use_cpu", "true"))
    start = time.perf_counter()
    trainings.run(words, folder.parent / "cache", given.threads, {"HF_MPS": "0"})
    said = trainings.read(folder / "train_results.json") | trainings.read(folder / "eval_results.json")
    return {
        "samples_per_second": said["train_samples_per_second"],
        "f1": said["eval_f1"],
        "accuracy": said["eval_accuracy"],
        "seconds": time.perf_counter() - start,
    }


def recipe(given: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """One training by the runner, with the recipe's own choices."""
    words = ["-m", "hf_mps.finetune", *trainings.recipe(training(given, seed), folder)]
    start = time.perf_counter()
    trainings.run(words, folder.parent / "cache", given.threads, {"HF_MPS_DEVICE": "cpu"})
    said = trainings.read(folder / "results.json")
    return {
        "samples_per_second": said["samples_per_second"],
        "f1": said["metrics"]["f1"],
        "accuracy": said["metrics"]["accuracy"],
        "seconds": time.perf_counter() - start,
    }


def training(given: argparse.Namespace, seed: int) -> trainings.Training:
    """What both sides train."""
    return trainings.Training(given.model, given.data, seed, given.learning_rate, given.epochs, given.steps)


def summary(found: dict[str, list[dict[str, float]]], *, scored: bool) -> dict[str, Any]:
    """The ratio of the mean speeds and, where `scored`, mean and deviation of F1 by name."""
    mean = {name: statistics.mean(one["samples_per_second"] for one in runs) for name, runs in found.items()}
    scores = {name: [one["f1"] for one in runs] for name, runs in found.items() if scored}
    f1 = {name: (statistics.mean(some), statistics.pstdev(some)) for name, some in scores.items()}
    return {"ratio": mean["hf_mps"] / mean["run_glue"], "f1": f1}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except trainings.Failed as failed:
        sys.exit(str(failed))
