"""The garbage collector looks at what a file of tests made, and not again at what all files before it left."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

MANY = 50_000
"""Objects that the collector looks through in a twentieth of a second."""


@pytest.fixture(scope="module", autouse=True)
def _looked_at_once() -> Iterator[None]:
    """Take what is alive after a file out of the collector's rounds, of which accelerate has several in a training.

    Half a million objects are left of six hundred tests: a round of them takes 0.4 s, a small training 0.3 s.
    """
    yield
    if len(gc.get_objects()) > MANY:
        gc.collect()
        gc.freeze()
