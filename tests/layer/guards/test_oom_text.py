"""accelerate's search for a batch size that fits takes Metal's error alone for a batch that was too large."""

from __future__ import annotations

import pytest
import pytorch_lightning.utilities.memory
from accelerate.utils import find_executable_batch_size

from hf_mps.layer import guards
from hf_mps.metal.device import memory
from tests import hazards


def test_another_error_is_another_error() -> None:
    @find_executable_batch_size(starting_batch_size=5)
    def train(batch_size: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        train()


@pytest.mark.parametrize("words", memory.REFUSALS)
def test_lightning_knows_each_of_metal_s_errors(words: str) -> None:
    assert pytorch_lightning.utilities.memory.is_oom_error(RuntimeError(f"{words}9.75 GiB"))


def test_the_report_names_the_library_that_does_not_know_the_text() -> None:
    guard = guards.get("oom-text")
    before = guard.verdict()
    with hazards.on("oom-text"):
        assert guard.verdict().value
        assert guard.verdict().reason.startswith("tried: a text of Metal's is unknown to ")
        assert "accelerate" in guard.verdict().reason
    assert guard.verdict() == before
