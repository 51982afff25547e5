"""How many rows a step has and how many steps there are, where several processes share them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from hf_mps.core.errors import UserError
from hf_mps.distributed.world import World
from hf_mps.finetune.features import arguments
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import failures


def loader_length(rows: int, batch: int, processes: int, drop_last: bool) -> int:
    """What accelerate gives the last of the processes."""
    from accelerate.data_loader import BatchSamplerShard

    drawn = BatchSampler(SequentialSampler(range(rows)), batch, drop_last)
    shard = BatchSamplerShard(drawn, processes, processes - 1, even_batches=True)
    assert len(list(shard)) == len(shard)
    return len(shard)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [48, 49, 63, 64, 65, 100])
def test_steps_are_what_accelerate_gives_each_process(rows: int, processes: int, drop_last: bool) -> None:
    training = {"num_train_epochs": 1, "dataloader_drop_last": drop_last}
    assert arguments.steps(training, rows, 4, 1, processes).value == loader_length(rows, 4, processes, drop_last)


@pytest.mark.parametrize(
    ("training", "rows", "said"),
    [
        ({}, 2500, "3 epochs of 79, for 2500 rows; each epoch ends with 28 rows of its beginning, for full batches"),
        ({}, 2496, "3 epochs of 78, for 2496 rows"),
        ({"dataloader_drop_last": True}, 2500, "3 epochs of 78, for 2500 rows"),
        ({"max_steps": 7}, 2500, "max_steps in the recipe"),
    ],
)
def test_rows_that_are_seen_twice_are_named(training: dict[str, Any], rows: int, said: str) -> None:
    assert arguments.steps(training, rows, 16, 1, 2).reason == said


def test_no_batch_for_each_process_is_refused() -> None:
    with pytest.raises(UserError, match="20 rows make no batches of 16 for 2 processes; leave it out"):
        arguments.steps({"dataloader_drop_last": True}, 20, 16, 1, 2)


@pytest.mark.parametrize(
    ("accumulation", "processes", "said"),
    [
        (1, 1, ""),
        (4, 1, "; 4 of them make a step of 32 rows"),
        (1, 2, "; one of them on each of 2 processes makes a step of 16 rows"),
        (4, 2, "; 4 of them on each of 2 processes make a step of 64 rows"),
    ],
)
def test_a_step_is_said_in_rows(accumulation: int, processes: int, said: str) -> None:
    assert arguments._whole(8, accumulation, processes) == said


def test_a_process_that_accelerate_started_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments._processes(World()) == {}
    for name, value in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_DYNAMO_BACKEND": "NO"}.items():
        monkeypatch.setenv(name, value)
    assert str(arguments._processes(World())["processes"]) == (
        "1 (accelerate launch was told of several, and starts one by itself unless the type is MULTI_GPU or FSDP; next:"
        " distributed_type: MULTI_GPU in its file, also without a GPU)"
    )


@pytest.mark.parametrize(
    ("training", "evaluation", "said"),
    [
        # What a task wants, as grpo does, and not the default of all others.
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16},
            False,
            ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=32"],
        ),
        ({}, False, ["training.per_device_train_batch_size=16", "training.gradient_accumulation_steps=2"]),
        ({"per_device_train_batch_size": 1}, False, []),
        ({"per_device_train_batch_size": 2}, True, ["training.per_device_eval_batch_size=16"]),
        ({"per_device_eval_batch_size": 1}, True, []),
    ],
)
def test_a_smaller_batch_is_half_of_the_runs_own(training: dict[str, Any], evaluation: bool, said: list[str]) -> None:
    assert arguments.smaller(training, evaluation) == said


def test_a_smaller_batch_that_a_recipe_refuses_is_no_way_on() -> None:
    resolved = load_recipe("kto/kto-mix", ["training.per_device_train_batch_size=2"])
    smaller = partial(arguments.smaller, {"per_device_train_batch_size": 2})
    assert failures.way_on(MemoryError(), resolved, smaller) == (
        "; next: close other programs, then hf-mps finetune kto/kto-mix training.per_device_train_batch_size=2"
    )
