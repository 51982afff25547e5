"""Being another machine for the length of a test."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest

from hf_mps.metal.device import machine

Having = Callable[..., None]


@pytest.fixture
def having(monkeypatch: pytest.MonkeyPatch) -> Having:
    """Be a machine with this torch, chip and macOS until the test ends; without macOS it is no Mac."""
    real = metadata.version

    def be(release: str, chip: str = "Apple M2", macos: str | None = "15.6") -> None:
        here = machine.Machine("Darwin" if macos else "Linux", "arm64", chip, 16 * 2**30, macos=macos)
        monkeypatch.setattr(machine, "_overridden", here)
        monkeypatch.setattr(metadata, "version", lambda name: release if name == "torch" else real(name))

    return be
