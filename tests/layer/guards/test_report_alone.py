"""The report of the guards by itself, as a person types it."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has its own device")
def test_the_report_switches_the_layer_on_where_nothing_has_yet(run_python) -> None:
    done = run_python("-c", "import hf_mps; print(hf_mps.guards.report())")
    assert done.returncode == 0, done.stderr
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert states["checkpoint-rng"] == "on"
    assert states["resume-rng"] == "waits"
