"""An Accelerator made as scripts of the years before 1.0 make it works, with a line of notice for each old name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from inline_snapshot import snapshot

from hf_mps.layer.compat import accelerator
from tests.layer.compat.arming import arm


@pytest.fixture(autouse=True)
def _states() -> Any:
    """No state of an earlier Accelerator, and none left."""
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()
    yield
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def test_the_keyword_of_0_12_is_taken(said, tmp_path: Path) -> None:
    made = Accelerator(logging_dir=str(tmp_path))
    assert (made.project_dir, made.logging_dir) == (str(tmp_path), str(tmp_path))
    assert said() == [f"Accelerator(logging_dir='{tmp_path}'): project_dir takes its place"]


def test_what_today_s_arguments_say_wins(said, tmp_path: Path) -> None:
    made = Accelerator(logging_dir="old", project_dir=str(tmp_path))
    assert made.project_dir == str(tmp_path)
    assert said() == snapshot(["Accelerator(logging_dir='old'): dropped, a project is given too"])


def test_a_script_asks_use_fp16(said) -> None:
    made = Accelerator()
    assert made.use_fp16 is False
    assert made.state.use_fp16 is False
    assert said() == snapshot(
        ['accelerator.use_fp16 is gone from accelerate 1; in its place: accelerator.mixed_precision == "fp16"']
    )


def test_an_unknown_keyword_is_as_unknown_as_before() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fp17'"):
        Accelerator(fp17=True)


def test_an_accelerate_that_has_the_names_keeps_its_own(said) -> None:
    class Old:
        use_fp16 = "mine"

        def __init__(self, fp16: bool = False) -> None:
            self.fp16 = fp16

    module = ModuleType("accelerate.accelerator")
    module.Accelerator = module.AcceleratorState = Old  # type: ignore[attr-defined]
    arm(accelerator, module)
    assert (Old(fp16=True).fp16, Old.use_fp16) == (True, "mine")
    assert said() == []
