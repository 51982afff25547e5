"""scripts/tools/old_examples.py runs a folder of example scripts and says of each what became of it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import datasets
import pytest
import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for
import transformers
from inline_snapshot import snapshot

from tests.scripts import script


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with no models in its world."""
    module = script("old_examples")
    monkeypatch.setattr(module.world, "MODELS", {})
    return module


def test_each_script_has_a_line_with_what_became_of_it(
    old: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(old.tempfile, "tempdir", str(work))
    says = {
        "run_glue": "import os, sys; assert os.path.isfile('pairs.csv'); assert '--use_mps_device' in sys.argv",
        "run_glue_no_trainer": "import sys; assert '--max_train_steps' in sys.argv; raise KeyError('x')",
        "run_clm": "import nowhere_to_be_found",
        "run_of_one_s_own": "",
    }
    for name, text in says.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert old.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["lacks", "run_clm"],
        ["works", "run_glue"],
        ["fails", "run_glue_no_trainer"],
        ["unknown", "run_of_one_s_own"],
    ]
    assert lines[0].endswith("ModuleNotFoundError: No module named 'nowhere_to_be_found'")
    assert lines[2].endswith("KeyError: 'x'")
    assert lines[-1] == snapshot("1 works, 1 fails, 1 lacks, 1 unknown of 4")
    assert old.main([str(tmp_path), "--only", "run_glue"]) == 0
    assert list(work.iterdir()) == []
    assert old.main([str(tmp_path), "--only", "run_glue", "--keep"]) == 0
    assert len(list(work.glob("old-examples-*/out/run_glue.log"))) == 1


def test_a_folder_without_scripts_is_told(old: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert old.main([str(tmp_path)]) == 2
    assert "no run_*.py to run" in capsys.readouterr().err


def test_every_command_line_names_files_and_models_that_are_made(
    old: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    made = set(old.world.MODELS)
    monkeypatch.setattr(old.world, "MODELS", {})
    old.world.make(tmp_path)
    for name, (model, words) in old.COMMANDS.items():
        assert model in made, name
        files = [word for word in words.split() if word.endswith((".txt", ".csv", ".json")) or "/" in word]
        assert all((tmp_path / file).exists() for file in files), name
    monkeypatch.chdir(tmp_path)
    rows = datasets.load_dataset("xnli", "en", split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.features["label"].names == ["entailment", "neutral", "contradiction"]


@pytest.mark.nightly
@pytest.mark.slow
def test_every_model_is_written_with_what_its_scripts_read(
    old: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for name, write in old.world.MODELS.items():
        write(tmp_path / name)
        transformers.AutoModel.from_pretrained(tmp_path / name)
        if name in ("vit", "vit_mae", "clip"):
            assert transformers.AutoFeatureExtractor.from_pretrained(str(tmp_path / name)).size == old.world.SIZE
