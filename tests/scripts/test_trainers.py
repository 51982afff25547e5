"""scripts/tools/trainers.py: other people's trainers on the CPU and on mps, side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.tools import trainers
from scripts.tools.trainers import Outcome


@pytest.mark.process
def test_a_trainer_has_the_cpus_losses_on_mps_and_a_row_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if trainers.version(trainers.TRAINERS["sentence-transformers"]) is None:
        pytest.skip("needs sentence-transformers")
    assert trainers.main(["sentence-transformers", "--page", str(tmp_path / "page.md")]) == 0
    assert capsys.readouterr().out.startswith("sentence-transformers: 6 losses, largest difference ")
    assert "| sentence-transformers 6." in (tmp_path / "page.md").read_text()


def test_other_losses_losses_that_stay_and_a_failed_program_are_not_right() -> None:
    assert Outcome((1.0, 0.5), (1.0, 0.50001)).right
    assert not Outcome((1.0, 0.5), (1.0, 0.501)).right
    assert not Outcome((1.0, 1.0), (1.0, 1.0)).right
    assert not Outcome((), (), "on mps: exit code 1: ValueError: no").right


def test_a_program_that_fails_is_told_by_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no rows')")
    monkeypatch.setattr(trainers, "PROGRAMS", tmp_path)
    told = trainers.run(trainers.Trainer("torch", "broken.py", "nothing", "nothing"))
    assert told.failed == "on cpu: exit code 1: ValueError: no rows"


def test_a_name_that_is_none_gets_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        trainers.main(["sciktorch"])
    assert ended.value.code == 2
    assert "'sciktorch' is no trainer; allowed: deepspeed, diffusers, " in capsys.readouterr().err
