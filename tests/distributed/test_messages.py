"""What ranks send each other comes back as it was, and whoever else writes there gets nothing run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.distributed import ranks
from hf_mps.distributed.ranks import Failure, Ranks
from hf_mps.distributed.world import World
from hf_mps.finetune.features.machine import MemoryAdjustments
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run.run_dir import RunDir


class Planted:
    """What becomes a call of `mkdir` where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, 2.5, "é", True, [None], {"a": (Path("x/y"), b"\0\xff"), 3: {4, 5}}),
        float("inf"),
        (None, Failure(1, "mac-1", True, "no such file")),
        RunDir(Path("runs/a"), "the default", named=False, checkpoint=Path("runs/a/checkpoint-3"), shared=False),
        MemoryAdjustments({"training.per_device_train_batch_size": 4}, {"batch": Choice(4, "fits")}, 5_000_000_000),
        load_recipe("quickstart", ["training.learning_rate=1e-4"]),
    ],
    ids=str,
)
def test_what_ranks_send_comes_back_as_it_was(value: Any) -> None:
    assert ranks.unpacked(ranks.packed(value)) == value


def test_a_recipe_that_came_over_can_be_changed_further() -> None:
    recipe = ranks.unpacked(ranks.packed(load_recipe("glue/mrpc")))
    changed = recipe.with_overrides({"training.num_train_epochs": 1, "seed": 7})
    assert (changed.recipe.seed, changed.recipe.training["num_train_epochs"]) == (7, 1)


def test_an_object_of_somebody_else_is_no_message() -> None:
    with pytest.raises(TypeError, match=r"a builtins\.object is no message between ranks"):
        ranks.packed([object()])


def test_what_a_stranger_writes_into_the_store_is_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickle.loads(pickle.dumps(Planted(made)))
    assert made.is_dir()  # as it was done to the messages of earlier releases
    made.rmdir()
    store = HashStore()
    store.set("1", pickle.dumps(Planted(made)))
    with pytest.raises(RunError, match=r"rank 1 of 2.*somebody else writes to the store of this run"):
        Ranks(World(1, 2, 1, 2), store).from_main(lambda: None)
    assert not made.exists()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "os:system", "value": {}},
        {"kind": "hf_mps.core.files:write_atomic", "value": {"path": "x", "content": "y"}},
        {"kind": "hf_mps.finetune.run.run_dir:Path", "value": {}},
        {"kind": "hf_mps.finetune.run.run_dir:RunDir", "value": {"path": "x"}},
        {"kind": "hf_mps.nowhere:Thing", "value": {}},
        {"other": 1},
    ],
    ids=str,
)
def test_a_message_makes_no_other_object_and_calls_nothing(message: Any) -> None:
    with pytest.raises(ranks.BrokenMessage):
        ranks.unpacked(json.dumps(message).encode())
