"""A run makes room in the machine's memory where its step would not fit, and says so; any other stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from hf_mps.core.choice import Choice
from hf_mps.finetune.features.machine import MemoryAdjustments
from hf_mps.tools.dryrun.memory import adjust
from hf_mps.tools.dryrun.memory.fit import CHECKPOINTING
from hf_mps.tools.dryrun.memory.machine import Machine
from tests.finetune.run_files import results
from tests.finetune.tiny import Command

MADE = MemoryAdjustments(
    adjust.ATTENTION | CHECKPOINTING,
    {"attention": Choice("blockwise", "memory"), "checkpointing": Choice(True, "memory")},
)


def test_a_run_on_a_machine_with_room_traces_nothing(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adjust, "make", None)
    assert finetune("my.yaml", "--fresh").code == 0
    assert not {"attention", "checkpointing"} & results(desk / "runs/my")["choices"].keys()


def test_a_run_makes_room_and_says_so_on_the_screen_and_in_its_results(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adjust, "present", lambda: Machine("a tiny Mac", 2**20, 2**20))
    monkeypatch.setattr(adjust, "make", lambda *_: MADE)
    ended = finetune("my.yaml")
    assert ended.code == 0
    assert [line.split()[:2] for line in ended.out.splitlines() if line.endswith("  memory")] == snapshot(
        [["checkpointing", "on"], ["attention", "blockwise"]]
    )
    said: dict[str, Any] = results(desk / "runs/my")["choices"]
    assert said["attention"] == {"value": "blockwise", "reason": "memory"}
    assert said["checkpointing"] == {"value": True, "reason": "memory"}


def test_a_user_s_word_is_taken_on_any_device_and_refused_where_a_model_cannot(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "attention=blockwise").code == 0
    assert results(desk / "runs/my")["choices"]["attention"]["reason"] == "attention in the recipe"
    assert finetune("my.yaml", "attention=flash").refused() == snapshot(
        "command line: attention is 'flash'; allowed: auto, blockwise, sdpa, eager"
    )
