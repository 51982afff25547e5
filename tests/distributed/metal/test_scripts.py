"""Scripts that know of no host train over several Macs as one process does with the same global batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import launch_hosts
from tests.distributed.metal.test_collectives import PROGRAMS, lines_of_main


def alone(program: str, run_python: Any, folder: Path) -> dict[str, Any]:
    done = run_python(PROGRAMS / program, folder, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"'))


@pytest.mark.nightly
def test_trainer_in_an_unchanged_script(tmp_path: Path, run_python: Any) -> None:
    (several,) = (each for each in lines_of_main(2, "trainer.py", str(tmp_path / "two")) if "device" in each)
    one = alone("trainer.py", run_python, tmp_path / "one")
    assert (several["device"], several["mode"]) == ("mps", "distributed")
    assert one["mode"] == "not_parallel"
    assert several["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert several["norms"] == pytest.approx(one["norms"], abs=1e-5)
    assert len(several["scores"]) == 13, "rows that fill up the last batch are no predictions"
    for found, wanted in zip(several["scores"], one["scores"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.slow
def test_lightning_in_an_unchanged_script(tmp_path: Path, run_python: Any) -> None:
    (several,) = lines_of_main(2, "lightning_fit.py", str(tmp_path))
    one = alone("lightning_fit.py", run_python, tmp_path)
    assert (several["strategy"], several["device"]) == ("DDPStrategy", "mps")
    assert one["strategy"] == "SingleDeviceStrategy"
    for found, wanted in zip(several["weights"], one["weights"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.process
def test_a_recipe_on_two_macs(tmp_path: Path) -> None:
    words = ("-m", "hf_mps.finetune", "glue/mrpc", "--smoke", f"output_dir={tmp_path / 'out'}")
    done = launch_hosts(2, *words, cwd=tmp_path, timeout=300)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr[-2000:]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["device"]["value"] == "mps"
    assert results["world"]["backend"] == "metal"
    assert [line for line in done[1].stdout.splitlines() if line.startswith("step ")] == [], "one progress, the main's"
