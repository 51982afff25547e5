"""The fixtures that put a test on the simulated device, whatever started the process, and give it empty folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def bare(mps: None) -> Iterator[None]:
    """The device without its guards."""
    from hf_mps.layer import guards

    with guards.suspended():
        yield
