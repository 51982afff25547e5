"""What people look at during a run: trackio's dashboard, and a notebook's bar and table. nightly.yml installs both."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.nightly]
WORDS = (
    *("finetune", "quickstart", "data.rows.train=32", "data.rows.validation=16", "training.num_train_epochs=2"),
    *("training.logging_steps=1", "output_dir=run"),
)


def test_trackio_has_one_run_named_as_the_folder(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("trackio")
    folder = tmp_path / "trackio"
    done = run_python("-m", "hf_mps", *WORDS, "training.report_to=trackio", env={"TRACKIO_DIR": str(folder)})
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, metrics FROM metrics").fetchall()
    assert {name for name, _ in rows} == {"run"}
    logged = [json.loads(metrics) for _, metrics in rows]
    assert sum("train/loss" in entry for entry in logged) == 4
    assert sum("eval/f1" in entry for entry in logged) == 2


def test_a_notebook_shows_a_bar_and_a_table_of_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.chdir(tmp_path)
    cell = nbformat.v4.new_code_cell(f"from hf_mps.cli.main import main\nmain({[*WORDS]})")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    (cell,) = notebook.cells
    shown = [output.data.get("text/html", "") for output in cell.outputs if output.output_type == "display_data"]
    table = next(each for each in shown if "<table" in each)
    assert "<progress value='4' max='4'" in table
    assert "<th>F1</th>" in table
    assert table.count("<tr>") == 2
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    assert "device     mps" in printed
    assert "hf-mps predict run FILE" in printed
