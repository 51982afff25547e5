"""A recipe in several processes: torchrun and accelerate launch train it as one process would, in one folder."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.launching import launch

FINETUNE = ("-m", "hf_mps.finetune")


def test_two_processes_train_one_run_and_one_of_them_speaks(tmp_path: Path) -> None:
    words = ("glue/mrpc", "--smoke", "output_dir=run")
    ended = launch(2, *FINETUNE, *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("hf_mps finetune glue/mrpc") == 1
    assert ended.stdout.count("step 6/6") == 1
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert len((tmp_path / "run" / "predictions.csv").read_text().splitlines()) == 1 + 16
    assert results["metrics"]["accuracy"] >= 0
    again = launch(2, *FINETUNE, "glue/mrpc", "nosuchkey=1", cwd=tmp_path)
    assert again.stderr.count("hf-mps: ") == 1
    assert "nosuchkey" in again.stderr
    assert "exitcode  : 2" in again.stderr
