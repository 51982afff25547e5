"""Compiled code is loaded only from where nobody else can have put it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_mps.core import cache

NAME = "build/_metal.so"
NOBODY = 65534


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    (tmp_path / "spare").mkdir()
    folder, why = cache.writable("build")
    assert why == ""
    made = folder / "_metal.so"
    made.write_bytes(b"code")
    made.chmod(0o755)
    return made


def test_what_the_user_made_is_found(built: Path) -> None:
    assert cache.find(NAME) == built


@pytest.mark.parametrize("place", ["file", "folder", "cache"])
def test_what_others_may_write_to_counts_as_not_made(built: Path, place: str) -> None:
    {"file": built, "folder": built.parent, "cache": built.parents[2]}[place].chmod(0o777)
    assert cache.find(NAME) is None


def test_a_folder_that_is_open_to_others_is_closed_before_anything_is_made_in_it(built: Path) -> None:
    built.parent.chmod(0o777)
    assert cache.writable("build") == (built.parent, "")
    assert cache.find(NAME) == built


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to give a file away")
def test_another_users_cache_is_not_used_by_root(built: Path) -> None:
    for each in (built, built.parent, built.parents[1], built.parents[2]):
        os.chown(each, NOBODY, NOBODY)
    assert cache.find(NAME) is None
    folder, why = cache.writable("build")
    assert folder.parents[2] == Path(os.environ["XDG_CACHE_HOME"]) / "spare"
    assert "belongs to another user" in why


def test_a_group_of_the_user_alone_may_write(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built.parent.chmod(0o775)
    monkeypatch.setattr(cache, "_alone_in", lambda group: True)
    assert cache.find(NAME) == built
    monkeypatch.setattr(cache, "_alone_in", lambda group: False)
    assert cache.find(NAME) is None
