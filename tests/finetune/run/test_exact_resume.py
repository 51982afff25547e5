"""A run of any task that goes on from a checkpoint is the unbroken one: weights, log and predictions, to the last bit.

The checkpoint lies within the second epoch and between two log entries, and the run ends within the third: what goes on
is the order of rows of an epoch and of the next, what varies an image, dropout, and all that is still to be logged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from safetensors.numpy import load_file

from hf_mps.cli.main import main
from tests.finetune import every_task
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

pytest.importorskip("sentence_transformers")

# Other tests hold it for GRPO (test_grpo.py), quantized weights (test_quantized.py) and the tasks of one label a row.
NAMES = (
    *("several-labels", "lists", "sparse", "speech", "masks", "boxes", "questions", "pictures"),
    *("taught", "preferences", "odds", "wanted"),
)
TIMED = ("runtime", "per_second", "preparation_time", "memory")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("every")
    every_task.write(folder, NAMES, dropout=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.chdir(folder)
        yield folder


def digest(weight: Any) -> str:
    return hashlib.sha256(weight.tobytes()).hexdigest()


def left(run: Path) -> dict[str, Any]:
    """What a run left that the clock has no part in."""
    said = results(run)
    whole = run / "model.safetensors"
    weights = load_file(whole if whole.is_file() else run / "adapter_model.safetensors")
    return {
        "weights": {name: digest(weight) for name, weight in weights.items()},
        "log": [{k: v for k, v in one.items() if not any(word in k for word in TIMED)} for one in said["log_history"]],
        "metrics": said["metrics"],
        "baseline": said["baseline"],
        "predictions": predictions(run),
    }


@pytest.mark.rotated
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_whole_one_and_is_measured_again_alike(
    name: str, place: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"per_device_train_batch_size": 4, "max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    settings |= {"logging_steps": 2, "learning_rate": 0.01, "eval_strategy": "'no'"}
    words = [f"{name}.yaml", "data.rows.train=8", *(f"training.{key}={value}" for key, value in settings.items())]
    assert finetune(*words, f"output_dir={name}-whole").code == 0
    checkpoint = f"training.resume_from_checkpoint={name}-whole/checkpoint-3"
    assert finetune(*words, checkpoint, f"output_dir={name}-again").code == 0
    whole = left(place / f"{name}-whole")
    assert [entry["step"] for entry in whole["log"] if "loss" in entry] == [2, 4]
    assert left(place / f"{name}-again") == whole
    assert not (place / f"{name}-again/checkpoint-3").exists()

    assert main(["evaluate", f"{name}-again", "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)["splits"]["validation"]["metrics"]
    assert measured == {metric: pytest.approx(value, rel=1e-4, abs=1e-5) for metric, value in whole["metrics"].items()}
