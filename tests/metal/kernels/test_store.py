"""The cache of fetched releases: what it holds, what it refuses to open, and that a hash is not computed twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.metal.kernels import store
from tests.metal.kernels.wheels import wheel
from tests.snapshots import masked

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def fetched(tmp_path: Path, own_cache: Path) -> Path:
    """The metallib of a small release 2.99.0."""
    assert main(["kernels", "fetch", "--wheel", str(wheel(tmp_path / "wheels"))]) == 0
    return store.path("2.99.0")


def _refused(release: str, **places: object) -> str:
    with pytest.raises(UserError) as refused:
        store.open_library(release)
    return masked(str(refused.value), cache=store.root(), **places)


def test_a_release_is_named_as_its_wheel_is() -> None:
    named = {
        "2.13": "2.13.0",
        "2.13.0": "2.13.0",
        "2.13.0+cpu": "2.13.0",
        "2.14.1": "2.14.1",
        "3": "3.0.0",
        "2.15.0.dev20261101+cpu": "2.15.0.dev20261101",
        "2.15rc1": "2.15.0rc1",
    }
    assert {each: store.canonical(each) for each in named} == named


def test_what_was_not_fetched_names_what_is_here(fetched: Path) -> None:
    assert _refused("2.98.1") == snapshot(
        "the Metal kernels of torch 2.98.1 are not fetched (2.99.0 here); next: hf-mps kernels fetch 2.98.1"
    )


def test_a_file_that_was_altered_is_refused_even_with_its_old_times(fetched: Path) -> None:
    store.open_library("2.99.0")
    status = fetched.stat()
    content = bytearray(fetched.read_bytes())
    content[-1] ^= 1
    fetched.write_bytes(content)
    os.utime(fetched, ns=(status.st_atime_ns, status.st_mtime_ns))
    was, now = store.facts("2.99.0").sha256, store.sha256(fetched)
    assert _refused("2.99.0", was=was[:12], now=now[:12]) == snapshot(
        "<cache>/2.99.0/macos14.metallib was altered: its sha256 is <now>…, <was>… when fetched; next: hf-mps"
        " kernels fetch 2.99.0"
    )


def test_a_file_that_ends_too_early_is_refused(fetched: Path) -> None:
    size = fetched.stat().st_size
    os.truncate(fetched, size - 1)
    assert _refused("2.99.0", size=f"{size:,}", left=f"{size - 1:,}") == snapshot(
        "<cache>/2.99.0/macos14.metallib has <left> bytes of <size>; next: hf-mps kernels fetch 2.99.0"
    )


@pytest.mark.parametrize("name", ["macos14.metallib", "release.json"])
def test_a_release_with_a_file_missing_is_as_good_as_absent(name: str, fetched: Path) -> None:
    (fetched.parent / name).unlink()
    assert _refused("2.99.0").endswith("; next: hf-mps kernels fetch 2.99.0")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"release": "2.99.0"}'])
def test_facts_that_cannot_be_read_are_refused(content: str, fetched: Path) -> None:
    (fetched.parent / "release.json").write_text(content)
    assert _refused("2.99.0").partition(" cannot be read (")[0] == "<cache>/2.99.0/release.json"


def test_a_folder_that_others_may_write_to_is_refused(fetched: Path) -> None:
    store.root().chmod(0o777)
    assert _refused("2.99.0") == snapshot(
        "others may write to <cache>, and its kernels are compiled and run; next: chmod 700 <cache>"
    )


def test_the_hash_is_computed_once_for_a_file_and_again_for_its_copy(
    fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    real = store.sha256
    monkeypatch.setattr(store, "sha256", lambda file: (computed.append(file), real(file))[1])
    store.open_library("2.99.0")
    store.open_library("2.99.0")
    assert computed == []  # fetching did it
    content = fetched.read_bytes()
    fetched.unlink()
    fetched.write_bytes(content)  # as a cache that CI unpacks
    store.open_library("2.99.0")
    store.open_library("2.99.0")
    assert computed == [fetched]


def test_a_record_of_the_hash_that_is_torn_is_made_anew(fetched: Path) -> None:
    record = fetched.parent / "verified.json"
    record.write_text("{")
    store.open_library("2.99.0")
    assert store.facts("2.99.0").sha256 in record.read_text()


def test_releases_are_removed_by_name_or_all(tmp_path: Path, fetched: Path, capsys: Printed) -> None:
    for release in ("2.97.0", "2.98.0"):
        assert main(["kernels", "fetch", "--wheel", str(wheel(tmp_path / "wheels", release))]) == 0
    capsys.readouterr()
    assert main(["kernels", "remove", "2.98"]) == 0
    assert capsys.readouterr().out == "torch 2.98.0: removed, 0 MiB\n"
    assert store.releases() == ["2.97.0", "2.99.0"]
    assert main(["kernels", "remove", "--all"]) == 0
    assert [each.name for each in store.root().iterdir() if not each.name.endswith(".lock")] == []


def test_remove_wants_to_know_what(fetched: Path, capsys: Printed) -> None:
    for arguments in ([], ["2.98"], ["2.99.0", "2.98"], ["2.99.0", "--all"]):
        assert main(["kernels", "remove", *arguments]) == 2
    assert capsys.readouterr().err.splitlines() == snapshot(
        [
            "hf-mps: which releases? fetched: 2.99.0; next: hf-mps kernels remove RELEASE, or --all",
            "hf-mps: torch 2.98.0 is not fetched; allowed: 2.99.0",
            "hf-mps: torch 2.98.0 is not fetched; allowed: 2.99.0",
            "hf-mps: which releases? fetched: 2.99.0; next: hf-mps kernels remove RELEASE, or --all",
        ]
    )
    assert store.releases() == ["2.99.0"]
