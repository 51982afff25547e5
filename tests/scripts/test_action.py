"""action.yml: the steps that set up the simulated device in anybody's workflow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    return yaml.safe_load((CHECKOUT / "action.yml").read_text(encoding="utf-8"))


@pytest.mark.process
def test_its_last_step_makes_the_device_and_says_so(action: dict[str, Any], tmp_path: Path) -> None:
    step = action["runs"]["steps"][-1]
    output = tmp_path / "output"
    given = {"PYTHON": sys.executable, "KERNELS": "", "HF_MPS_SIMULATE": "1", "GITHUB_OUTPUT": str(output)}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env={**os.environ, **given}, check=True, text=True)
    assert done.returncode == 0
    assert output.read_text().startswith("device=mps (Metal passed its probe on Apple M2 Pro (simulated)")


@pytest.mark.process
def test_it_fails_where_the_tests_would_run_on_another_device(action: dict[str, Any], tmp_path: Path) -> None:
    step = action["runs"]["steps"][-1]
    given = {"PYTHON": sys.executable, "KERNELS": "", "HF_MPS_DEVICE": "cpu", "GITHUB_OUTPUT": str(tmp_path / "output")}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env={**os.environ, **given}, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    assert "::error::the tests would run on cpu" in done.stdout


def test_steps_get_inputs_as_variables_and_never_as_text_of_a_script(action: dict[str, Any]) -> None:
    for step in action["runs"]["steps"]:
        script = step.get("run", "")
        assert "${{" not in script
        subprocess.run(["bash", "-n", "-c", script], check=True)
    words = str(action["runs"])
    assert all(f"inputs.{name}" in words for name in action["inputs"])
    assert action["outputs"]["device"]["value"] == "${{ steps.device.outputs.device }}"
