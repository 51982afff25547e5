"""Recorded steps of several processes: the gradients are averaged in the graph, and the numbers are DDP's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_mps.finetune.cuda_graphs.steps import FIRST, SECOND
from tests.distributed.agents import Agent
from tests.finetune.cuda_graphs.several import CASES

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.together]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, agent: Agent) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("several")
    ended = agent.launch(2, "-m", "tests.finetune.cuda_graphs.several", folder, "cpu", *CASES, cwd=folder)
    assert ended.codes == [0, 0], ended.err
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_the_same_training_as_under_ddp(ranks: list[dict[str, Any]], case: str) -> None:
    for said in (rank[case] for rank in ranks):
        for name, values in said["plain"].items():
            assert said["ours"][name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
        assert said["apart"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_keep_the_same_weights(ranks: list[dict[str, Any]], case: str) -> None:
    assert ranks[0][case]["sum"] == ranks[1][case]["sum"]


@pytest.mark.parametrize("case", CASES)
def test_all_but_two_steps_are_replayed(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["eager"] == {FIRST: 1, SECOND: 1}
        assert rank[case]["replayed"] == 7  # of three epochs of three batches each


def test_no_stream_of_before_is_kept_while_steps_are_recorded(ranks: list[dict[str, Any]]) -> None:
    # DDP's reducer keeps the nodes of autograd, which send work to the stream that they were made on.
    assert {str(said["nodes"]) for rank in ranks for said in rank.values()} == {"[False, True]"}


@pytest.mark.parametrize("case", CASES)
def test_a_wait_that_nobody_measured_is_no_figure(ranks: list[dict[str, Any]], case: str) -> None:
    # DDP's clock stands in its reducer, which recorded steps go without: `efficiency` is null in results.json.
    for plain, ours in (rank[case]["waited"] for rank in ranks):
        assert plain > 0
        assert ours is None
