"""What the processes of a run tell each other: values, errors, and that all are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from hf_mps.core.errors import RunError, UserError, run_command
from hf_mps.distributed import voice
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from tests.distributed.launching import launch


def together(size: int, act: Callable[[Ranks], Any], local_size: int | None = None) -> list[Any]:
    """What `act` returns, or raises, as each of `size` ranks, in threads that meet in one store."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def one(rank: int) -> Any:
        here = local_size or size
        world = World(rank, size, rank % here, here, rank // here)
        try:
            return act(Ranks(world, store))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def told(error: object) -> tuple[type, str, bool]:
    assert isinstance(error, UserError | RunError), error
    return type(error), str(error), error.quiet


def test_the_main_process_makes_what_all_get() -> None:
    made: list[int] = []

    def act(ranks: Ranks) -> list[object]:
        def make() -> dict[str, int]:
            made.append(ranks.world.rank)
            return {"by": ranks.world.rank}

        return [ranks.from_main(make), ranks.from_main(lambda: None)]

    assert together(3, act) == [[{"by": 0}, None]] * 3
    assert made == [0]


def test_an_error_of_the_main_process_is_everybodys_and_said_once() -> None:
    def act(ranks: Ranks) -> None:
        def make() -> None:
            raise UserError("no such file; next: another one")

        ranks.from_main(make)

    main, other = together(2, act)
    assert told(main) == (UserError, "no such file; next: another one", False)
    assert told(other) == (UserError, "no such file; next: another one", True)


def test_a_bug_of_the_main_process_ends_the_others_too() -> None:
    main, other = together(2, lambda ranks: ranks.from_main(lambda: [][1]))
    assert isinstance(main, IndexError)
    assert told(other) == (RunError, "IndexError: list index out of range", True)


def test_what_cannot_be_pickled_ends_all() -> None:
    main, other = together(2, lambda ranks: ranks.from_main(threading.Lock))
    assert isinstance(main, TypeError)
    assert isinstance(other, RunError)


def test_each_rank_hears_what_all_have() -> None:
    assert together(4, lambda ranks: ranks.gather(ranks.world.rank**2)) == [[0, 1, 4, 9]] * 4


def test_nothing_is_left_in_the_store() -> None:
    store = HashStore()

    def act(rank: int) -> None:
        ranks = Ranks(World(rank, 2, rank, 2), store)
        ranks.gather(rank)
        ranks.from_main(lambda: 1)
        ranks.gather(None)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
    assert store.num_keys() == 0


def test_an_error_of_one_rank_alone_is_said_by_the_main_process_with_its_name() -> None:
    def act(ranks: Ranks) -> int:
        def make() -> int:
            if ranks.world.rank == 1:
                raise UserError("rows.csv is not there")
            return ranks.world.rank

        return ranks.run_on_all(make)

    main, failed, other = (told(one) for one in together(3, act))
    assert main[0] is UserError
    assert main[1].startswith("rank 1 on ")
    assert main[1].endswith(": rows.csv is not there")
    assert not main[2]
    assert failed == other == (*main[:2], True)


def test_an_error_of_all_ranks_is_said_once_and_as_it_is() -> None:
    def act(ranks: Ranks) -> None:
        def make() -> None:
            raise UserError("no recipe of that name")

        ranks.run_on_all(make)

    assert [told(one) for one in together(2, act)] == [
        (UserError, "no recipe of that name", False),
        (UserError, "no recipe of that name", True),
    ]


def test_where_all_agree_each_keeps_its_own_value() -> None:
    assert together(3, lambda ranks: ranks.run_on_all(lambda: ranks.world.rank)) == [0, 1, 2]


def test_the_first_process_of_each_host_goes_first() -> None:
    order: list[tuple[int, int]] = []

    def act(ranks: Ranks) -> int:
        def make() -> int:
            if ranks.world.local_main:
                time.sleep(0.1)
            order.append((ranks.world.local_rank, ranks.world.rank))
            return ranks.world.rank

        return ranks.main_first(make)

    assert together(4, act, local_size=2) == [0, 1, 2, 3]
    assert {rank for _, rank in order[:2]} == {0, 2}


def test_a_quiet_error_ends_a_command_with_its_code_and_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError("said elsewhere")
    error.quiet = True

    def command() -> None:
        raise error

    assert run_command(command) == 2
    assert capsys.readouterr().err == ""


def test_a_rank_that_wrote_nothing_ends_without_an_empty_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(1, 2, 1, 2)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setattr(voice, "GRACE", 0.01)
    monkeypatch.setattr(voice, "_in_main_thread", lambda: False)  # or it would take the signals of the tests
    monkeypatch.setattr(World, "here", lambda: world)
    monkeypatch.setattr(Ranks, "here", lambda: Ranks(world, HashStore()))
    with pytest.raises(RunError, match="no space is left") as raised, voice.one_voice():
        raise RunError("no space is left")
    assert not raised.value.quiet
    assert capsys.readouterr().err == ""


def test_processes_of_torchrun_share_before_there_is_a_process_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch.distributed as dist\n"
        "from hf_mps.distributed.ranks import Ranks\n"
        "ranks = Ranks.here()\n"
        "assert ranks is Ranks.here()\n"
        "first = ranks.from_main(lambda: 'from the main process')\n"
        "assert not dist.is_initialized()\n"
        "dist.init_process_group('gloo')\n"
        "import torch\n"
        "sum = torch.ones(1)\n"
        "dist.all_reduce(sum)\n"
        "seen = ranks.gather(ranks.world.local_rank)\n"
        "dist.destroy_process_group()\n"
        "if ranks.world.main: print(first, seen, int(sum))\n"
    )
    ended = launch(2, program)
    assert (ended.returncode, ended.stdout) == (0, "from the main process [0, 1] 2\n"), ended.stderr
