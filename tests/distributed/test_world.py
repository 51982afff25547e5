"""Which of several processes this is: as torchrun's and MPI's variables say, and nothing where there is no launcher."""

from __future__ import annotations

from typing import Any

import pytest

from hf_mps.core.errors import UserError
from hf_mps.distributed import world
from hf_mps.distributed.world import World

VARIABLES = (
    *world.SIZE,
    *world.RANK,
    *world.LOCAL_SIZE,
    *world.LOCAL_RANK,
    *world.NODE,
    *world.RESTARTS,
    *world.MEETING,
    world.OF_ACCELERATE,
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets a launcher's variables, and no others."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def launch(**variables: object) -> World:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return World.here()

    return launch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0},
        {"WORLD_SIZE": -1, "LOCAL_RANK": -1},  # older launchers' word for unset
    ],
    ids=["no launcher", "torchrun with one process", "minus one"],
)
def test_a_process_that_has_no_others_is_alone(launched: Any, variables: dict[str, int]) -> None:
    assert launched(**variables) == World()
    assert (World().alone, World().main, World().local_main, World().hosts) == (True, True, True, 1)


def test_torchrun_says_all(launched: Any) -> None:
    here = launched(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, GROUP_RANK=1, TORCHELASTIC_RESTART_COUNT=2)
    assert here == World(rank=5, size=8, local_rank=1, local_size=4, node=1, restarts=2)
    assert (here.main, here.local_main, here.hosts, str(here)) == (False, False, 2, "rank 5 of 8 on host 1 of 2")


def test_mpirun_says_it_with_other_names_and_no_host(launched: Any) -> None:
    here = launched(
        OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_LOCAL_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=1
    )
    assert here == World(rank=3, size=4, local_rank=1, local_size=2, node=1)


def test_the_main_process_is_named_without_a_host_where_there_is_one(launched: Any) -> None:
    assert str(launched(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2)) == "rank 0 of 2"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number of processes; allowed: 0, 1, 2, …"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is no rank of WORLD_SIZE=2; allowed: 0 to 1"),
    ],
)
def test_variables_that_contradict_are_refused(launched: Any, variables: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        launched(**variables)


def test_no_torch_is_imported_to_know_it(run_python: Any) -> None:
    code = (
        "import sys; from hf_mps.distributed.ranks import Ranks; from hf_mps.distributed.world import World\n"
        "print(World.here(), Ranks.here().from_main(lambda: 7), Ranks.here().gather(8), 'torch' in sys.modules)"
    )
    ended = run_python("-c", code, env=dict.fromkeys(VARIABLES))
    assert ended.stdout == "rank 0 of 1 7 [8] False\n", ended.stderr


def test_a_process_that_accelerate_launch_started_alone_though_several_were_asked_for_is_known(launched: Any) -> None:
    told = {"MASTER_ADDR": "mac-0", "MASTER_PORT": 29500, "ACCELERATE_DYNAMO_BACKEND": "NO"}
    assert launched(**told).alone
    assert World.asked_for()
    launched(WORLD_SIZE=1)  # by torchrun's agent, as the user said
    assert not World.asked_for()
