"""The collected benchmarks: a table for each signed line, simulated ones apart, and no row that is not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.tools import benchmarks_page

FIGURES = {"seconds": 0.5, "rows_per_second": 256.0, "memory_bytes": 3 * 2**30}
ROW: dict[str, Any] = {
    "signed_off_by": "Ada Lovelace",
    "schema": 1,
    "kind": "bench",
    "command": "hf-mps bench",
    "date": "2026-01-02",
    "device": "mps",
    "simulated": False,
    "machine": {"chip": "Apple M9", "memory_bytes": 16 * 2**30, "processor": "Apple M9", "system": "macOS 27.0"},
    "versions": {"torch": "2.13.0", "transformers": "5.23.0", "hf_mps": "0.1.0"},
    "cases": [
        {
            "network": "ResNet50",
            "phase": "training",
            "batch": 128,
            "row": "3 x 224 x 224",
            "over_cpu": 8.0,
            "devices": {"mps": FIGURES, "cpu": {"rows_per_second": 32.0, "memory_bytes": 2**30}},
        }
    ],
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_row_has_its_machine_its_signer_its_command_and_its_figures(tmp_path: Path) -> None:
    text = "\n".join(benchmarks_page.lines(written(tmp_path, ROW)))
    assert "**Apple M9**, 16 GiB, macOS 27.0; torch 2.13.0" in text
    assert "signed off by\nAda Lovelace. `hf-mps bench`" in text
    assert "| ResNet50 | training | 128 of 3 x 224 x 224 | 256.0 | 32.0 | 8.00 | 3.00 GiB |" in text
    assert "simulated" not in text


def test_simulated_rows_stand_under_a_heading_and_a_column_that_say_so(tmp_path: Path) -> None:
    text = "\n".join(benchmarks_page.lines(written(tmp_path, {**ROW, "simulated": True}, ROW)))
    real, _, simulated = text.partition("### The field's networks on the simulated device: no Mac's speed")
    assert "mps, rows/s" in real
    assert "mps (simulated), rows/s" in simulated
    assert "(computed by Apple M9)" in simulated


@pytest.mark.parametrize("wrong", [{"signed_off_by": None}, {"kind": "guess"}, {"kind": "peers", "simulated": True}])
def test_a_row_that_is_not_whole_is_refused_with_its_line(wrong: dict[str, Any], tmp_path: Path) -> None:
    broken = {name: value for name, value in {**ROW, **wrong}.items() if value is not None}
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: "):
        list(benchmarks_page.lines(written(tmp_path, ROW, broken)))


def test_every_row_that_is_stored_can_be_shown() -> None:
    assert list(benchmarks_page.lines())
