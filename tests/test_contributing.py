"""What CONTRIBUTING.md promises whoever adds something: one file where it says one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_mps.cli.main import main
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.recipe.resolve import load_recipe

RECIPE = """\
# Fine-tune BERT to sort tickets into queues.
#
# Command    python -m hf_mps.finetune support/tickets
task: text-classification
model: google-bert/bert-base-cased
data:
  files: {train: tickets.csv, validation: held_out.csv}
  columns: {text: body, label: queue}
"""


def test_a_recipe_is_one_yaml_file_that_is_found_validated_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "support").mkdir()
    (tmp_path / "support" / "tickets.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.setattr(catalogue, "folder", lambda: tmp_path)
    assert main(["recipes", "list"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == "support/tickets Fine-tune BERT to sort tickets into queues"
    assert load_recipe("support/tickets", ["data.columns.text=subject"]).recipe.data.columns.text == "subject"
    assert main(["finetune", "support/tickets", "data.columns.txt=subject", "--plan"]) == 2
    assert "data.columns.txt" in capsys.readouterr().err
