"""A recipe in several processes: torchrun and accelerate launch train it as one process would, in one folder."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_mps.finetune.run.callbacks import OwnDraws
from tests.distributed.agents import Agent

FINETUNE = ("-m", "hf_mps.finetune")


def test_two_processes_train_one_run_and_one_of_them_speaks(tmp_path: Path, agent: Agent) -> None:
    # By torchrun itself: tests/scripts/test_several_machines.py.
    ended = agent.launch(2, *FINETUNE, "glue/mrpc", "--smoke", "output_dir=run", cwd=tmp_path)
    assert ended.codes == [0, 0], ended.err
    said = "".join(ended.out)
    assert said.count("hf_mps finetune glue/mrpc") == 1
    assert said.count("step 6/6") == 1
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert len((tmp_path / "run" / "predictions.csv").read_text().splitlines()) == 1 + 16
    assert results["metrics"]["accuracy"] >= 0
    world = results["world"]
    assert (world["processes"], world["strategy"], world["backend"]) == (2, "MULTI_CPU", "gloo")
    assert world["hosts"] == [platform.node()]
    assert [one["rank"] for one in world["ranks"]] == [0, 1]
    assert world["samples_per_second"] == pytest.approx(results["samples_per_second"])
    assert sum(one["samples_per_second"] for one in world["ranks"]) == pytest.approx(
        world["samples_per_second"], rel=0.5
    )  # each by its own clock
    assert 0 <= world["efficiency"] <= 1


def test_a_wrong_word_is_said_by_one_of_them_and_ends_all(tmp_path: Path, agent: Agent) -> None:
    ended = agent.launch(2, *FINETUNE, "glue/mrpc", "nosuchkey=1", cwd=tmp_path)
    assert ended.codes == [2, 2]
    assert "".join(ended.err).count("hf-mps: ") == 1
    assert "nosuchkey" in ended.err[0]


@pytest.mark.parametrize(("processes", "rank", "seed"), [(1, 0, 7), (2, 0, 3), (2, 1, 4)])
def test_each_of_several_processes_draws_for_itself(processes: int, rank: int, seed: int) -> None:

    args = SimpleNamespace(world_size=processes, process_index=rank, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        OwnDraws().on_train_begin(args, None, None)
        assert torch.initial_seed() == seed
