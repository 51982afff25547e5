"""`hf-mps plan --ranks`: what each rank holds under FSDP2, beside what two real processes held."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import UntypedStorage, distributed

from hf_mps.core.errors import UserError
from hf_mps.tools.dryrun.memory import sharded
from hf_mps.tools.dryrun.memory.fit import MemoryPlan
from hf_mps.tools.dryrun.memory.machine import named
from hf_mps.tools.dryrun.resolve import resolve_target
from tests.distributed.agents import Agent
from tests.finetune.sharding.made import language_model

RECIPE, ASKED = "causal-lm/wikitext", "training.fsdp=true"
QUICK = ("training.max_steps=3", "training.save_strategy=no")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("made")
    return language_model(folder, hidden_size=256, num_hidden_layers=4)


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def planned(words: list[str], ranks: int) -> MemoryPlan:
    return sharded.plan(resolve_target(RECIPE, [*words, ASKED]), ranks, named("16gb"))


@pytest.fixture(scope="module")
def of_two(words: list[str], offline: None) -> MemoryPlan:
    return planned(words, 2)


@pytest.mark.slow
def test_what_stays_is_divided(words: list[str], of_two: MemoryPlan) -> None:
    whole = 4 * (2 * 600 * 256 + 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024) + 9 * 256)
    parts = of_two.estimate.parts
    assert parts["weights"] == pytest.approx(whole / 2, rel=0.01)
    assert parts["optimizer"] == pytest.approx(whole, rel=0.01)
    of_four = planned(words, 4).estimate.parts
    assert of_four["weights"] == pytest.approx(whole / 4, rel=0.01)
    assert of_four["optimizer"] == pytest.approx(whole / 2, rel=0.01)
    assert of_four["activations"] == parts["activations"]


def test_what_is_gathered_is_a_few_blocks_and_not_the_model(of_two: MemoryPlan) -> None:
    block = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024)
    assert block < of_two.estimate.parts["gathered"] < 4 * block


@pytest.mark.process
@pytest.mark.slow
def test_two_processes_hold_what_was_planned(
    tmp_path: Path, agent: Agent, words: list[str], of_two: MemoryPlan
) -> None:
    program = ("-m", "tests.tools.dryrun.memory.one_rank", tmp_path)
    ended = agent.launch(2, *program, RECIPE, *words, *QUICK, ASKED, f"output_dir={tmp_path}/run", cwd=tmp_path)
    assert ended.codes == [0, 0], ended.err
    for rank in range(2):
        said = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert said["stays"] == pytest.approx(
            sum(of_two.estimate.parts[part] for part in ("weights", "optimizer")), rel=0.01
        )
        assert said["stays"] + said["passes"] == pytest.approx(of_two.estimate.bytes, rel=0.1)


def test_a_recipe_that_asks_for_no_division_is_told_how() -> None:
    with pytest.raises(UserError, match=r"--ranks 2 divides a model by FSDP, .* next: training\.fsdp=true"):
        sharded.plan(resolve_target("glue/mrpc"), 2)


def test_nothing_of_the_other_ranks_is_left(of_two: MemoryPlan) -> None:
    assert not distributed.is_initialized()
    assert "resize_" not in vars(UntypedStorage)
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ
