"""A host that goes to sleep: it is missed after a minute, and neither one that is slow nor one that has left is."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from hf_mps.core.errors import UserError
from hf_mps.distributed.neighbours import Neighbours
from hf_mps.distributed.world import World

SILENCE = 60.0


@pytest.fixture
def ranks() -> tuple[Neighbours, Neighbours]:
    """The only ranks of two hosts, each introduced."""
    store = HashStore()
    main, other = (Neighbours(World(rank, 2, 0, 1, rank), store) for rank in (0, 1))
    main.introduce()
    other.introduce()
    return main, other


def test_a_host_without_a_sign_of_life_is_away(ranks: tuple[Neighbours, Neighbours]) -> None:
    main, _ = ranks
    assert main.away(0.0) is None
    assert main.away(SILENCE - 1) is None
    away = main.away(SILENCE + 1)
    assert away is not None
    assert away[0] == 1


def test_a_sign_of_life_begins_the_minute_anew(ranks: tuple[Neighbours, Neighbours]) -> None:
    main, other = ranks
    main.away(0.0)
    other.beat()
    assert main.away(SILENCE - 1) is None
    assert main.away(SILENCE + 1) is None
    assert main.away(2 * SILENCE + 1) is not None


def test_who_has_left_or_was_never_there_is_not_missed(ranks: tuple[Neighbours, Neighbours]) -> None:
    main, other = ranks
    main.away(0.0)
    other.leave()
    assert main.away(10 * SILENCE) is None
    lonely = Neighbours(World(0, 2, 0, 1, 0), HashStore())
    assert [lonely.away(at) for at in (0.0, 10 * SILENCE)] == [None, None]


def test_the_user_says_how_long_a_host_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_SILENCE", "20")
    assert Neighbours(World(0, 2, 0, 1, 0), HashStore()).silence == 20
    for word in ("2.5", "soon", "inf"):
        monkeypatch.setenv("HF_MPS_SILENCE", word)
        with pytest.raises(UserError, match=rf"HF_MPS_SILENCE={word} is no patience .*; allowed: seconds, from 3 on"):
            Neighbours(World(0, 2, 0, 1, 0), HashStore())


def test_ranks_of_this_host_are_looked_for_by_their_processes() -> None:
    store = HashStore()
    main, other = (Neighbours(World(rank, 2, rank, 2, 0), store) for rank in (0, 1))
    main.introduce()
    other.introduce()
    assert [main.away(at) for at in (0.0, 10 * SILENCE)] == [None, None]
