"""The release's kernels in front of the simulated device's, for the tests of launch rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from hf_mps.core.errors import UserError
from hf_mps.metal import kernels as metal_kernels
from hf_mps.metal.kernels import store
from hf_mps.metal.kernels.rules import Dispatch
from hf_mps.metal.simulator import build


@pytest.fixture
def kernels(release: str) -> Iterator[Dispatch]:
    """The rules of the fetched release, which run while the test does; `kernels.ledger` counts from zero."""
    with running(release) as dispatch:
        yield dispatch


@pytest.fixture
def newer() -> Iterator[Dispatch]:
    """The same of a newer release, where that was fetched (hf-mps kernels fetch 2.14.1)."""
    try:
        metal_kernels.check("2.14.1")
    except UserError as error:
        pytest.skip(str(error))
    with running("2.14.1") as dispatch:
        yield dispatch


@cache
def _read_before(release: str) -> dict[str, Any]:
    """What a Release has once it was used: the library, whose list takes 0.2 s to read, and kernels that are loaded."""
    return {"library": store.open_library(release), "_kernels": {}}


@contextmanager
def running(release: str) -> Iterator[Dispatch]:
    """The rules of a fetched release run for the block."""
    metal_kernels.enable(release, build.running("these tests need the simulated device"))
    dispatch = metal_kernels.running()
    vars(dispatch.release).update(_read_before(release))
    try:
        yield dispatch
    finally:
        metal_kernels.disable()
