"""The fixtures that put a test on the simulated device, whatever started the process, and give it empty folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mps() -> None:
    """The simulated device is loaded in this process (on a Mac: the test is skipped, Metal is there)."""
    import torch

    from hf_mps import simulator

    if simulator.loaded() is None:
        if torch.backends.mps.is_built():
            pytest.skip("this PyTorch has real Metal")
        simulator.load("1")


@pytest.fixture
def bare(mps: None) -> Iterator[None]:
    """The device without its guards."""
    from hf_mps import guards

    with guards.suspended():
        yield


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The simulator's two folders, empty and the test's own: what this machine has compiled or stored is not seen.

    Returns the usual one (it is not made yet); the other is below tmp_path / "temporary".
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "cache" / "hf_mps" / "simulator"
