"""PyTorch's own Metal kernels for the tests of this room: one release, fetched once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_mps.cli.main import main
from hf_mps.metal.kernels import store
from hf_mps.metal.kernels.metallib import Library

RELEASE = "2.13.0"


@pytest.fixture(scope="session")
def release() -> str:
    """The release whose Metal kernels the tests run, as `store`'s functions take it: fetched, "2.13.0".

    It is fetched with the verb itself where the user's cache does not hold it yet, and stays there for the next run, as
    the compiled simulated device does; the verb's own lock keeps two runs at once from fetching it twice. Where the
    package index cannot be reached, the tests that need it fail with the verb's one line.
    """
    return fetched(RELEASE)


def fetched(version: str) -> str:
    """That release, fetched where it is not here."""
    try:
        assert main(["kernels", "fetch", version, "--debug"]) == 0
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}", pytrace=False)
    return version


@pytest.fixture(scope="session")
def library(release: str) -> Library:
    """The kernels of that release."""
    return store.open_library(release)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched releases, the test's own; it is not made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf_mps" / "kernels"


@pytest.fixture
def pip_index(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let pip ask one index alone, whatever the machine's configuration says."""

    def ask(url: str) -> None:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_RETRIES", "0")

    return ask
