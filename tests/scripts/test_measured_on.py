"""Every benchmark says first which device its figures are of, and whether that is a simulated one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal.device import machine
from scripts.bench import compare_stock, measured_on
from tests import CHECKOUT

SCRIPTS = CHECKOUT / "scripts" / "bench"
BENCHMARKS = sorted([*SCRIPTS.glob("bench_*.py"), SCRIPTS / "check_plan.py", SCRIPTS / "simulator_conformance.py"])


def test_the_line_names_the_simulated_chip_and_the_one_that_computes(simulated: None) -> None:
    assert re.fullmatch(
        r"measured on: mps, Apple M.* \(simulated\), \d+ GPU cores, "
        rf"computed by {re.escape(machine.real().chip)}: no Mac's speed or memory",
        measured_on.line(),
    )
    assert measured_on.line("cpu") == f"measured on: cpu, {machine.real().chip}"


def test_a_macs_own_figures_are_a_macs(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = machine.Machine("Darwin", "arm64", "Apple M4", 16 * 2**30, macos="26.0")
    monkeypatch.setattr(machine, "_overridden", mac)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    assert re.fullmatch(r"measured on: mps, Apple M4, \d+ GPU cores", measured_on.line())


def test_the_benchmarks_are_found() -> None:
    assert len(BENCHMARKS) >= 10


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_prints_it_before_its_figures(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert 0 < source.find("measured_on.line") < source.find("print(f")


def test_a_benchmark_as_a_person_runs_it(simulated: None, run_python) -> None:
    words = ["--rounds", "1", "--sizes", "1 KB", "--operators", "logit_"]
    done = run_python(SCRIPTS / "bench_fallback.py", *words)
    assert done.stdout.startswith("measured on: mps, Apple M"), done.stderr
    assert "(simulated)" in done.stdout.splitlines()[0]
    assert "\nlogit_ " in done.stdout


def test_a_comparison_tells_whose_seconds_are_no_macs(tmp_path: Path) -> None:
    runs = {"stock": [{"f1": 0.8, "train_seconds": 1.0}], "ours": [{"f1": 0.8, "train_seconds": 1.0, "simulated": 1.0}]}
    told = list(compare_stock.table("glue/mrpc", [42], compare_stock.compared(runs), runs))
    assert told[-1] == snapshot("  hf_mps trained on the simulated device: its seconds are no Mac's")
    assert json.dumps(compare_stock.compared(runs)).count("simulated") == 0
    runs["ours"][0]["simulated"] = 0.0
    assert "seconds of training" in list(compare_stock.table("glue/mrpc", [42], compare_stock.compared(runs), runs))[-1]
