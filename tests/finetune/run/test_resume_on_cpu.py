"""A recipe's run that was killed on the CPU, where nothing of Metal is armed, goes on as the unbroken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import python
from tests.finetune.run import on_cpu
from tests.finetune.run.test_exact_resume import left


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "processes", "dropout", "steps"), [("masked", 1, 0.1, (4, 10)), ("classification", 2, 0.0, (8,))]
)
def test_a_run_that_was_killed_ends_as_the_unbroken_one(
    name: str, processes: int, dropout: float, steps: tuple[int, ...], tmp_path: Path
) -> None:
    """Within the first epoch and the second: masks and dropout share the CPU's generator, two ranks share the rows."""
    on_cpu.write(tmp_path, name, dropout)
    env = {"HF_HOME": str(tmp_path / "cache")}
    ended = python(Path(on_cpu.__file__), name, str(processes), *map(str, steps), cwd=tmp_path, env=env, timeout=300)
    assert ended.returncode == 0, ended.stderr
    whole = left(tmp_path / "whole")
    assert [entry["step"] for entry in whole["log"] if "loss" in entry][:3] == [2, 4, 6]
    for step in steps:
        assert "goes on from" in ended.stdout
        assert left(tmp_path / f"killed-{step}") == whole
