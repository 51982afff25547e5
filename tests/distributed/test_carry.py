"""Files go from the host that has them to those that have not, whole, in pieces, with a digest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_mps.core.errors import RunError
from hf_mps.distributed import carry
from hf_mps.distributed.ranks import Ranks
from tests.distributed.test_ranks import together

CONTENT = {"model.bin": os.urandom(5000), "empty": b"", "below/part.bin": os.urandom(64), "state.json": b"{}"}
SENDER = 1


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "PIECE", 1024)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One for each of three ranks; that of the sender has the files."""
    made = [tmp_path / str(rank) for rank in range(3)]
    for folder in made:
        folder.mkdir()
    for name, content in CONTENT.items():
        (made[SENDER] / name).parent.mkdir(exist_ok=True)
        (made[SENDER] / name).write_bytes(content)
    return made


def carried(folders: list[Path], times: int = 1) -> list[Any]:
    """What each rank's call raised; several calls one after the other, into the same folders."""
    files = carry.listing(folders[SENDER])

    def act(ranks: Ranks) -> None:
        for time in range(times):
            folder = folders[ranks.world.rank]
            carry.carry(ranks, f"try {time}", files, folder, sender=SENDER, receivers=[0, 2])
            if ranks.world.rank != SENDER and time + 1 < times:
                for file in files:
                    (folder / file.name).unlink()

    return together(3, act)


def test_all_receivers_have_the_files_to_the_byte(folders: list[Path]) -> None:
    assert carried(folders, times=3) == [None] * 3
    for folder in folders:
        assert {file.name: (folder / file.name).read_bytes() for file in carry.listing(folder)} == CONTENT


def test_a_receiver_that_cannot_write_stops_nobody_else(folders: list[Path]) -> None:
    (folders[0] / "model.bin").write_bytes(b"somebody's")
    first, *others = carried(folders)
    assert isinstance(first, FileExistsError)
    assert others == [None, None]
    assert (folders[0] / "model.bin").read_bytes() == b"somebody's"
    assert (folders[2] / "model.bin").read_bytes() == CONTENT["model.bin"]


def test_a_file_that_went_away_is_the_sender_s_error_alone(folders: list[Path]) -> None:
    files = carry.listing(folders[SENDER])
    (folders[SENDER] / "model.bin").unlink()

    def act(ranks: Ranks) -> None:
        carry.carry(ranks, "gone", files, folders[ranks.world.rank], sender=SENDER, receivers=[0])

    receiver, sender, _ = together(3, lambda ranks: act(ranks) if ranks.world.rank < 2 else None)
    assert isinstance(sender, FileNotFoundError)
    assert receiver is None  # whoever called both raises the sender's


def test_what_came_otherwise_is_refused(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stock = carry._Local.piece

    def piece(local: Any, view: memoryview) -> None:
        stock(local, view)
        if not local._writes and len(view) == 64:
            view[0] ^= 1  # on its way

    monkeypatch.setattr(carry._Local, "piece", piece)
    for error in (each for rank, each in enumerate(carried(folders)) if rank != SENDER):
        assert isinstance(error, RunError)
        assert str(error).startswith("below/part.bin came otherwise than it was read")


def test_a_folder_of_the_same_name_is_not_the_same_folder(folders: list[Path]) -> None:
    places = [folders[0], folders[0], folders[2]]
    assert together(3, lambda ranks: carry.seen(ranks, places[ranks.world.rank])) == [[True, True, False]] * 3
    assert all(not list(folder.glob(".seen-*")) for folder in folders)
