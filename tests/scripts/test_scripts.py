"""The scripts in scripts/ know nothing of hf_mps and train on Metal, with old flags, or where HF_MPS_DEVICE says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import CHECKOUT

SCRIPTS = CHECKOUT / "scripts" / "examples"
SHARED = CHECKOUT.parent / "shared" / "data"


def words(line: str) -> list[str]:
    return line.split()


TRAINER = words("--do_train --do_eval --logging_steps 4 --report_to none --disable_tqdm True --save_strategy no")
# Script -> the arguments of a short run.
SHORT = {
    "run_glue.py": [*TRAINER, *words("--max_steps 24 --learning_rate 5e-3 --per_device_train_batch_size 32")],
    "run_ner.py": [*TRAINER, *words("--max_steps 16 --learning_rate 5e-3")],
    "run_clm.py": [
        *TRAINER,
        *words("--max_steps 16 --learning_rate 5e-3 --block_size 32 --max_train_samples 400 --max_eval_samples 50"),
    ],
    "run_glue_no_trainer.py": words("--max_train_steps 24 --learning_rate 5e-3 --num_warmup_steps 6"),
    "lightning_glue.py": words("--max_steps 40 --max_epochs 5 --learning_rate 2e-3"),
}


@pytest.fixture
def train(run_python, tmp_path: Path):
    """Run a script of scripts/ and return its standard error and what its output folder says: device, losses."""

    def train(name: str, *arguments: str, launcher: tuple[str, ...] = (), **env: str) -> tuple[str, dict[str, Any]]:
        out = tmp_path / "out"
        done = run_python(
            *launcher,
            SCRIPTS / name,
            *arguments,
            "--output_dir",
            out,
            env={"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore", **env},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert (out / "model.safetensors").stat().st_size > 100_000
        assert (out / "tokenizer.json").is_file()
        return done.stderr + done.stdout, _results(out)

    return train


def _results(out: Path) -> dict[str, Any]:
    results = json.loads((out / "all_results.json").read_text())
    state = out / "trainer_state.json"
    if state.is_file():
        results["losses"] = [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]
    return results


def falls(losses: list[float]) -> bool:
    third = max(len(losses) // 3, 1)
    return sum(losses[-third:]) < 0.97 * sum(losses[:third])


def generated(tmp_path: Path) -> list[str]:
    """The arguments for two files of sentences with an obvious label."""
    said = (["dull", "slow", "cold"], ["bright", "quick", "warm"])
    rows = [f"the film {number % 7} was {said[number % 2][number % 3]},{number % 2}" for number in range(320)]
    for name, part in (("train", rows[:256]), ("validation", rows[256:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["sentence,label", *part]) + "\n")
    return ["--train_file", str(tmp_path / "train.csv"), "--validation_file", str(tmp_path / "validation.csv")]


def test_no_script_says_a_word_about_hf_mps() -> None:
    for name in (*SHORT, "sources.py"):
        text = (SCRIPTS / name).read_text().lower()
        assert "hf_mps" not in text
        assert "hf-mps" not in text


# On the CPU one of each kind of loop: Trainer's, a bare one of Accelerate, Lightning's.
@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "mps") for name in SHORT]
    + [(name, "cpu") for name in ("run_glue.py", "run_glue_no_trainer.py", "lightning_glue.py")],
)
def test_a_script_trains_on_metal_or_on_the_cpu_where_asked(name: str, device: str, train, tmp_path: Path) -> None:
    data = generated(tmp_path) if "glue" in name else []
    said, results = train(name, *SHORT[name], *data, **({"HF_MPS_DEVICE": "cpu"} if device == "cpu" else {}))
    assert f"Device: {device}" in said
    assert falls(results["losses"]), results["losses"]
    assert "eval_loss" in results or "accuracy" in results or "val_accuracy" in results


DOCUMENTED = words(
    "--use_mps_device --do_train --do_eval --max_seq_length 128 --per_device_train_batch_size 32 "
    "--learning_rate 2e-5 --num_train_epochs 3 --overwrite_output_dir"
)


def test_the_documentation_s_command_works_and_deletes_nothing(train, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-500").mkdir(parents=True)
    (out / "checkpoint-500" / "mine.txt").write_text("kept")
    (out / "notes.txt").write_text("kept too")
    said, results = train("run_glue.py", *DOCUMENTED, "--report_to", "none", *generated(tmp_path))
    lines = [line for line in said.splitlines() if line.startswith("hf-mps: ")]
    assert "hf-mps: --use_mps_device: dropped, mps is taken where it works (HF_MPS_DEVICE=mps insists on it)" in lines
    assert (
        f"hf-mps: overwrite_output_dir: files of the same name in {out} are written over, nothing is deleted; "
        "of an earlier run stay checkpoint-500"
    ) in lines
    assert len([line for line in lines if "use_mps" in line or "overwrite" in line]) == 2
    assert (out / "checkpoint-500" / "mine.txt").read_text() == "kept"
    assert (out / "notes.txt").read_text() == "kept too"
    assert results["epoch"] == 3.0
    assert "Device: mps" in said


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run_glue.py", ["--task_name", "mrpc", "--max_eval_samples", "100"]),
        ("run_clm.py", ["--model_name_or_path", str(SHARED / "models" / "stories260K"), "--max_eval_samples", "50"]),
    ],
)
def test_real_data_and_real_weights(name: str, arguments: list[str], train, shared_data: Path, minilm: Path) -> None:
    model = ["--model_name_or_path", str(minilm), "--learning_rate", "2e-4"] if name == "run_glue.py" else []
    rate = model or ["--learning_rate", "1e-3"]
    more = [
        "--max_steps",
        "9",
        "--logging_steps",
        "3",
        "--per_device_train_batch_size",
        "16",
        "--max_train_samples",
        "300",
    ]
    said, results = train(name, *TRAINER, *arguments, *rate, *more)
    assert "Device: mps" in said
    assert results["losses"][-1] < results["losses"][0]
    assert results["eval_loss"] < (0.75 if name == "run_glue.py" else 5)
