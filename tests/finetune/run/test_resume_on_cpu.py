"""A recipe's run that was killed on the CPU, where nothing of Metal is armed, goes on as the unbroken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import python
from tests.finetune.run import on_cpu
from tests.finetune.run.test_exact_resume import left


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "processes", "dropout", "places"),
    [("masked", 1, 0.1, ("3", "10", "7-SIGKILL", "7-SIGTERM")), ("classification", 2, 0.0, ("7",))],
)
def test_a_run_that_was_stopped_ends_as_the_unbroken_one(
    name: str, processes: int, dropout: float, places: tuple[str, ...], tmp_path: Path
) -> None:
    """Within both epochs and in the evaluation between: masks and dropout share a generator, two ranks the rows."""
    on_cpu.write(tmp_path, name, dropout)
    env = {"HF_HOME": str(tmp_path / "cache")}
    ended = python(Path(on_cpu.__file__), name, str(processes), *places, cwd=tmp_path, env=env, timeout=300)
    assert ended.returncode == 0, ended.stderr
    whole = left(tmp_path / "whole")
    assert [entry["step"] for entry in whole["log"] if "loss" in entry][:3] == [2, 4, 6]
    for where in places:
        assert left(tmp_path / f"stopped-{where}") == whole
