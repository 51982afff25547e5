"""What is collected: of tests that start a Python a part's eighth, and of garbage what the file of tests made."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have a commit run an eighth of a part's tests that start a Python, and not of each file's: 2 to 20 s each."""
    for item in items:
        if "run_python" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("rotated"):
            item.add_marker(pytest.mark.rotated("/"))
