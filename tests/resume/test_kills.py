"""Real processes of `hf-mps finetune`, killed up to three times each, end as the run that was never killed.

A few of those that `python scripts/tools/kills.py` tries each night, always the same.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.resume.kills.chains import Harness
from tests.resume.kills.variants import VARIANTS
from tests.share import nightly_but

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.together,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and cc"),
]
DRAWS = ("short-1", "short-2")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(tmp_path_factory.mktemp("kills"))
    yield made
    made.processes.end()


@pytest.mark.parametrize("variant", nightly_but(("best", "stream"), ["max-steps", "best", "lora", "stream"]))
def test_a_run_that_is_killed_anywhere_ends_as_the_unbroken_one(variant: str, harness: Harness) -> None:
    chains = [harness.chain(VARIANTS[variant], "cpu", draw) for draw in DRAWS]
    assert [chain.differs for chain in chains] == [""] * len(DRAWS), [list(map(str, one.kills)) for one in chains]
    assert any(chain.kills for chain in chains)
