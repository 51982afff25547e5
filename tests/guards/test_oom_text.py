"""accelerate's search for a batch size that fits takes Metal's error alone for a batch that was too large."""

from __future__ import annotations

import pytest
from accelerate.utils import find_executable_batch_size

from hf_mps import guards
from hf_mps.simulator import hazards


def test_another_error_is_another_error() -> None:
    @find_executable_batch_size(starting_batch_size=5)
    def train(batch_size: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train()


def test_the_report_names_the_library_that_does_not_know_the_text() -> None:
    guard = guards.get("oom-text")
    before = guard.verdict()
    with hazards.on("oom-text"):
        assert guard.verdict().value
        assert guard.verdict().reason.startswith("tried: Metal's text is unknown to ")
        assert "accelerate" in guard.verdict().reason
    assert guard.verdict() == before
