"""Kernels of our own need Metal source compiled, for which the simulated device has clang."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_mps.core import cache
from hf_mps.metal.training_kernels import trial


@pytest.fixture(autouse=True)
def _trials_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No trial was made before, and none is kept afterwards."""
    home = cache.home
    monkeypatch.setattr(trial.cache, "home", lambda room: tmp_path if room == "training_kernels" else home(room))
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(trial, "_overruled", {})
    monkeypatch.delenv("HF_MPS_TRAINING_KERNELS", raising=False)
