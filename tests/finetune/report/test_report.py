"""A run's files: results.json to be read by programs, training.png by people, README.md by both."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils  # first of all: importing it sets a variable, which no test may do

import hf_mps
from hf_mps.core.choice import Choice
from hf_mps.finetune import report
from hf_mps.metal.kernels.coverage import Coverage
from tests.finetune.records import a_record, history
from tests.finetune.run_files import results

pytestmark = pytest.mark.usefixtures("rendered")

GUARD = {"name": "checkpoint-rng", "times": 1, "lines": ["the same numbers are drawn"], "issue": "pytorch#1"}


def test_a_run_leaves_three_files_and_nothing_else_and_replaces_an_earlier_ones(tmp_path: Path) -> None:
    report.write(tmp_path / "out", a_record(name="first"))
    written = report.write(tmp_path / "out", a_record(name="second"))
    assert written == [tmp_path / "out" / name for name in ("results.json", "training.png", "README.md")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "results.json", "training.png"]
    assert results(tmp_path / "out")["name"] == "second"
    assert "# second\n" in (tmp_path / "out/README.md").read_text()


def test_results_json_has_its_schema_and_every_number_of_the_run(tmp_path: Path) -> None:
    record = a_record(fallback=[{"operator": "aten::_ctc_loss", "calls": 3}], guards=[GUARD])
    report.write(tmp_path, record)
    content = results(tmp_path)
    assert content.pop("versions").keys() == {
        "hf_mps", "torch", "transformers", "accelerate", "datasets", "python", "platform",
    }  # fmt: skip
    assert content.pop("log_history") == history()
    assert content == {
        "schema": 1,
        "name": "glue/mrpc",
        "recipe": {"model": "google-bert/bert-base-cased", "training": {"learning_rate": 2e-5, "seed": 42}},
        "device": {"value": "mps", "reason": "Metal answered the probe"},
        "simulated": False,
        "choices": {
            "precision": {"value": "float32", "reason": "bf16 | fp16 are emulated"},
            "batch": {"value": 32, "reason": "the recipe's"},
        },
        "metrics": {"f1": 0.8821, "accuracy": 0.8431, "loss": 0.41},
        "main_metric": "f1",
        "greater_is_better": True,
        "split": "validation",
        "baseline": {
            "what": "always answers 1, the label of 67.4% of the training rows",
            "metrics": {"f1": 0.81, "accuracy": 0.68},
        },
        "expectation": {"metric": "f1", "low": 0.85, "high": None, "met": True},
        "train_seconds": 192.3,
        "samples_per_second": 57.24,
        "peak_memory_bytes": 2_085_000_000,
        "fallback": [{"operator": "aten::_ctc_loss", "calls": 3}],
        "doubt": None,
        "unexpected_fallback": [],
        "metal_kernels": None,
        "training_kernels": {},
        "predictions": None,
        "pictures": [],
        "stream": None,
        "world": None,
        "guards": [GUARD],
        "sentinels": [],
    }


def test_every_key_of_results_json_is_documented() -> None:
    documented = re.findall(r"`(\w+)`", report.results.__doc__ or "")
    assert set(report.results(a_record())) <= set(documented)


def test_a_diverged_run_is_strict_json_with_nulls(tmp_path: Path) -> None:
    diverged = a_record(
        metrics={"f1": float("nan")}, log_history=[{"loss": float("nan"), "grad_norm": float("inf"), "step": 1}]
    )
    report.write(tmp_path, diverged)
    assert results(tmp_path)["metrics"] == {"f1": None}
    assert results(tmp_path)["log_history"] == [{"loss": None, "grad_norm": None, "step": 1}]


def test_local_paths_stand_in_the_files_by_their_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "me"
    (home / "minilm").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    recipe = {
        "model": "~/minilm",
        "output_dir": str(home / "runs/one"),
        "data": {
            "files": {"train": f"{home}/private/pairs.csv", "validation": "../mine/dev.csv", "test": "hf://a/b.csv"}
        },
        "training": {"resume_from_checkpoint": "~/old/checkpoint-3"},
    }
    record = a_record(
        model=str(home / "minilm"),
        recipe=recipe,
        dataset=None,
        dataset_name=f"{home}/private/pairs.csv, ../mine/dev.csv",
        choices={
            "output": Choice(f"{home}/runs/one", "output_dir in the recipe"),
            "model": Choice("~/minilm", f"read from {home}/minilm, as {home}/.cache has it"),
        },
        guards=[GUARD | {"lines": [f"{home}/private/pairs.csv has rows like nyu-mll/glue"]}],
    )
    report.write(home / "runs/one", record)
    for name in ("results.json", "README.md"):
        text = (home / "runs/one" / name).read_text()
        assert not re.search(r"home/me|private|mine/|old/|runs/", text), name
    said = results(home / "runs/one")
    assert said["recipe"]["data"]["files"] == {"train": "pairs.csv", "validation": "dev.csv", "test": "hf://a/b.csv"}
    assert (said["recipe"]["model"], said["recipe"]["output_dir"]) == ("minilm", "one")
    assert said["choices"]["model"] == {"value": "minilm", "reason": "read from minilm, as ~/.cache has it"}
    assert said["guards"][0]["lines"] == ["pairs.csv has rows like nyu-mll/glue"]
    assert "Fine-tuned from `minilm` on pairs.csv, dev.csv, by hf_mps" in (home / "runs/one/README.md").read_text()


def test_versions_are_those_installed() -> None:

    found = report.versions()
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert found["hf_mps"] == hf_mps.__version__
    assert found["python"] == platform.python_version()


def test_reading_the_record_and_a_header_need_no_torch_and_no_matplotlib(run_python: Callable[..., Any]) -> None:
    program = (
        "import sys; from hf_mps.finetune import report; from hf_mps.finetune.report.screen import header\n"
        "header([('a', 1, 'b')], title='hf_mps')\n"
        "print([name for name in ('transformers', 'rich', 'numpy') if name in sys.modules]); report.versions()\n"
        "print([name for name in ('torch', 'matplotlib', 'huggingface_hub') if name in sys.modules])"
    )
    done = run_python("-c", program, env={"HF_MPS": "0"})
    assert done.stdout == "hf_mps\n  a  1  b\n[]\n[]\n", done.stderr


def test_what_ran_with_a_releases_kernels_is_recorded() -> None:
    ran = Coverage("2.13.0", 9, 4, {("aten::cat", "why"): 1}, {"MPSGraph": 2})
    assert report.results(a_record(metal_kernels=ran))["metal_kernels"] == {
        "release": "2.13.0",
        "launches": 9,
        "kernels": 4,
        "share": 0.9,
        "missing": [{"operator": "aten::cat", "reason": "why", "launches": 1}],
        "others": {"MPSGraph": 2},
    }
