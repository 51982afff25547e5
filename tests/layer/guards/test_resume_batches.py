"""A resumed epoch has the rows of the unbroken run and what it draws at random for them, in every kind of loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_mps.layer import guards
from hf_mps.layer.guards.resume.batches import FILE
from tests.layer.guards.resume_loops import Loop, trainer_goes_on

LOOPS = {
    "the sampler of shuffle=True": Loop(),
    "a seeded sampler": Loop(seedable=True),
    "a generator of the user's": Loop(generator=True),
    "a script that counts batches": Loop(skips=False),
    "a stream": Loop(stream=True),
}


@pytest.mark.parametrize(("epoch", "batches"), [(0, 1), (1, 3), (2, 4), (1, 5)])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_an_accelerate_loop_goes_on_with_the_same_batches(loop: Loop, epoch: int, batches: int, tmp_path: Path) -> None:
    assert loop.goes_on(tmp_path, epoch, batches)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trainer_goes_on_whatever_it_fetches_ahead(accumulation: int, tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    assert trainer_goes_on(tmp_path, **settings)


def test_a_run_that_went_on_can_be_gone_on_with_again(tmp_path: Path) -> None:
    whole = Loop().run(tmp_path, (1, 2), None)
    Loop().run(tmp_path, (1, 4), (1, 2))
    rest = Loop().run(tmp_path, None, (1, 4))
    assert rest == whole[-len(rest) :]


@pytest.mark.slow  # each worker imports torch
def test_of_a_loader_with_workers_the_order_of_rows_is_kept(tmp_path: Path) -> None:
    loop = Loop(workers=1, epochs=2)
    whole, rest = loop.run(tmp_path, (1, 3), None), loop.run(tmp_path, None, (1, 3))
    assert [[int(number) for number in batch] for _, _, batch, _ in rest] == [
        [int(number) for number in batch] for _, _, batch, _ in whole[-len(rest) :]
    ]


def test_a_script_that_goes_on_elsewhere_trains_all_the_same(tmp_path: Path) -> None:
    Loop().run(tmp_path, (1, 3), None)
    assert len(Loop().run(tmp_path, None, (1, 4))) == 11


def test_a_checkpoint_says_where_the_loader_is(tmp_path: Path) -> None:
    Loop().run(tmp_path, (1, 3), None)
    stored = torch.load(tmp_path / FILE, weights_only=True)
    assert stored["loader"] == 0
    assert stored["active"]["number"] == 3
    assert guards.get("resume-batches").lines == [f"checkpoints also hold where the loader is in its epoch, in {FILE}"]


def test_a_checkpoint_of_before_the_guard_is_read(tmp_path: Path) -> None:
    with guards.suspended("resume-batches", "resume-epoch"):
        Loop().run(tmp_path, (1, 3), None)
    assert not (tmp_path / FILE).exists()
    assert len(Loop().run(tmp_path, None, (1, 3))) == 12
