"""Files of a run are whole: the old one or the new one, strict JSON, nothing left beside them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest

from hf_mps.core import files
from hf_mps.core.choice import Choice
from hf_mps.distributed import ranks


def strictly(path: Path) -> object:
    """The file as strict JSON, in which NaN and Infinity do not exist."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_text_and_bytes_are_written_as_given_and_missing_folders_are_made(tmp_path: Path) -> None:
    assert files.write_atomic(tmp_path / "a/b/text", "grüße ▲\n") == tmp_path / "a/b/text"
    files.write_atomic(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "a/b/text").read_bytes() == "grüße ▲\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"


def test_an_existing_file_is_replaced_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "f", "long old content")
    files.write_atomic(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_replaces_one_that_holds_files_and_a_file_never_does(tmp_path: Path) -> None:
    for place, name in (("new", "config.json"), ("old", "left by a kill")):
        (tmp_path / place).mkdir()
        (tmp_path / place / name).touch()
    with pytest.raises(IsADirectoryError):
        files.write_atomic(tmp_path / "old", "x")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["left by a kill"]
    files.replace_file(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "config.json"]


def test_the_file_has_the_permissions_that_any_new_file_has(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    written = files.write_atomic(tmp_path / "f", "x")
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace")], ids=["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_full_disk_and_ctrl_c_surface_keep_the_old_file_and_remove_the_hidden_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], error: BaseException
) -> None:
    files.write_atomic(tmp_path / "f", "old")

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(*place, broken)
    with pytest.raises(type(error)) as caught:
        files.write_atomic(tmp_path / "f", "new")
    assert caught.value is error
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_the_new_file_is_on_the_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append("replace"), replace(self, to))[1])
    files.write_atomic(tmp_path / "f", "x")
    assert order == ["fsync", "replace"]


@dataclasses.dataclass
class Pair:
    left: int
    right: float


def test_json_is_strict_and_takes_what_a_run_holds(tmp_path: Path) -> None:
    value = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf"), 1.5],
        "numpy": numpy.float32(0.5),
        "numpy nan": numpy.float64("nan"),
        "array": numpy.arange(3),
        "choice": Choice("mps", "the probe was answered"),
        "pair": Pair(1, float("nan")),
        "path": Path("out/model"),
        "tuple": (1, None, True),
        "set": {"b", "a"},
        3: "a number as key",
        "word": "▲ größer",
    }
    files.write_json(tmp_path / "f.json", value)
    assert strictly(tmp_path / "f.json") == {
        "nan": None,
        "inf": [None, None, 1.5],
        "numpy": 0.5,
        "numpy nan": None,
        "array": [0, 1, 2],
        "choice": {"value": "mps", "reason": "the probe was answered"},
        "pair": {"left": 1, "right": None},
        "path": "out/model",
        "tuple": [1, None, True],
        "set": ["a", "b"],
        "3": "a number as key",
        "word": "▲ größer",
    }


def test_a_member_of_an_enumeration_is_its_value(tmp_path: Path) -> None:
    kind: Any = Enum("Kind", {"ONE": "one"}, type=str)  # type: ignore[misc]
    number: Any = Enum("Number", {"TWO": 2}, type=int)  # type: ignore[misc]
    values = {"kind": kind["ONE"], "number": number["TWO"], kind["ONE"]: numpy.str_("text")}
    written = {"kind": "one", "number": 2, "one": "text"}
    assert strictly(files.write_json(tmp_path / "values.json", values)) == written
    assert ranks.unpacked(ranks.packed(values)) == written


def test_a_file_name_that_is_no_utf_8_is_written_all_the_same(tmp_path: Path) -> None:
    name = os.fsdecode(b"data-\xff.csv")
    files.write_json(tmp_path / "f.json", {"file": name})
    assert strictly(tmp_path / "f.json") == {"file": name}


def test_what_json_has_no_form_for_is_refused_by_name_and_the_old_file_stays(tmp_path: Path) -> None:
    files.write_json(tmp_path / "f.json", 1)
    with pytest.raises(TypeError, match="type object"):
        files.write_json(tmp_path / "f.json", {"thing": object()})
    assert strictly(tmp_path / "f.json") == 1
