"""Fetching with the user's own pip, from an index of the test's own: what is kept, what is checked, what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.metal import kernels
from hf_mps.metal.kernels import fetch, store
from tests.metal.kernels.wheels import COMMIT, KERNELS, index, metallib, mlx_wheel, served, wheel
from tests.snapshots import masked

pytestmark = pytest.mark.rotated("::")  # pip takes half a second or more in each
Printed = pytest.CaptureFixture[str]
Index = Callable[[str], None]


def _left(cache: Path) -> list[str]:
    """What lies in the folder of releases beside locks."""
    return sorted(each.name for each in cache.iterdir() if not each.name.endswith(".lock")) if cache.is_dir() else []


def _refused(arguments: list[str], capsys: Printed, code: int = 2, **places: object) -> str:
    """The one line in which the verb refuses."""
    assert main(["kernels", *arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith("hf-mps: ")
    assert err.count("\n") == 1
    return masked(err.removeprefix("hf-mps: ").rstrip("\n"), **places)


def test_a_release_is_fetched_checked_and_kept_whole(
    tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed
) -> None:
    made = wheel(tmp_path / "wheels")
    with served(tmp_path / "simple", made) as url:
        pip_index(url)
        assert main(["kernels", "fetch", "2.99"]) == 0
    said = capsys.readouterr().out
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    assert f"torch 2.99.0: {made.name}, " in said
    assert "torch 2.99.0: 4 kernels in 2 families, 0 MiB, in 0." in said
    assert f" s; kept in {own_cache}/2.99.0\n" in said
    content = metallib(*KERNELS)
    assert (own_cache / "2.99.0" / "macos14.metallib").read_bytes() == content
    assert json.loads((own_cache / "2.99.0" / "release.json").read_text()) == {
        "release": "2.99.0",
        "git_version": COMMIT,
        "wheel": made.name,
        "wheel_sha256": digest,
        "kernels": 4,
        "families": 2,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_the_folder_is_the_users_alone_and_no_wheel_stays(tmp_path: Path, own_cache: Path, pip_index: Index) -> None:
    pip_index(index(tmp_path / "simple", wheel(tmp_path / "wheels")))
    assert main(["kernels", "fetch", "2.99.0"]) == 0
    assert [stat.S_IMODE(each.stat().st_mode) for each in (own_cache, own_cache / "2.99.0")] == [0o700, 0o700]
    assert _left(own_cache) == ["2.99.0"]
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_what_is_here_and_whole_is_not_fetched_again(
    tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed
) -> None:
    made = wheel(tmp_path)
    assert main(["kernels", "fetch", "--wheel", str(made)]) == 0
    pip_index("http://127.0.0.1:9/simple")
    capsys.readouterr()
    for arguments in (["2.99"], ["--wheel", str(made)]):
        assert main(["kernels", "fetch", *arguments]) == 0
        assert capsys.readouterr().out == f"torch 2.99.0: here already, 4 kernels in {own_cache}/2.99.0\n"


def test_what_is_broken_is_fetched_again(tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    made = wheel(tmp_path)
    assert main(["kernels", "fetch", "--wheel", str(made)]) == 0
    (own_cache / "2.99.0" / "macos14.metallib").write_bytes(b"short")
    assert main(["kernels", "fetch", "--wheel", str(made)]) == 0
    assert f"{own_cache}/2.99.0/macos14.metallib has 5 bytes of" in capsys.readouterr().out
    assert len(store.open_library("2.99.0")) == 4
    assert _left(own_cache) == ["2.99.0"]


def test_several_releases_are_fetched_in_one_call(tmp_path: Path, own_cache: Path, pip_index: Index) -> None:
    releases = ("2.98.0", "2.99.0", "2.100.0")
    pip_index(index(tmp_path / "simple", *(wheel(tmp_path / "wheels", release) for release in releases)))
    assert main(["kernels", "fetch", *releases]) == 0
    assert store.releases() == ["2.98.0", "2.99.0", "2.100.0"]


def test_mlx_is_fetched_beside_pytorch_and_loads(
    tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed
) -> None:
    pip_index(index(tmp_path / "simple", mlx_wheel(tmp_path / "wheels")))
    assert main(["kernels", "fetch", "mlx-0.99"]) == 0
    assert main(["kernels", "fetch", "--wheel", str(wheel(tmp_path))]) == 0
    assert store.releases() == ["mlx-0.99.0", "2.99.0"]
    assert store.facts("mlx-0.99.0").git_version == ""
    assert set(store.open_library("mlx-0.99.0")) == set(KERNELS)
    assert "MLX 0.99.0: 4 kernels in 2 families" in capsys.readouterr().out
    with pytest.raises(UserError, match="MLX's kernels, which are no operators of PyTorch"):
        kernels.check("mlx-0.99.0")
    assert main(["kernels", "remove", "mlx-0.99.0"]) == 0
    assert capsys.readouterr().out.startswith("MLX 0.99.0: removed, ")


def test_the_installed_release_is_the_default(tmp_path: Path, own_cache: Path, pip_index: Index) -> None:
    own = store.installed()
    assert own is not None
    pip_index(index(tmp_path / "simple", wheel(tmp_path / "wheels", own)))
    assert main(["kernels", "fetch"]) == 0
    assert store.releases() == [own]


def test_a_wheel_of_an_older_macos_will_do(tmp_path: Path, own_cache: Path, pip_index: Index) -> None:
    pip_index(index(tmp_path / "simple", wheel(tmp_path / "wheels", platform="macosx_11_0_arm64")))
    assert main(["kernels", "fetch", "2.99.0"]) == 0


@pytest.mark.parametrize("metadata", [True, False])
def test_a_wheel_that_is_not_the_one_of_the_index_is_refused(
    metadata: bool, tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed
) -> None:
    made = wheel(tmp_path / "wheels")
    own, other = hashlib.sha256(made.read_bytes()).hexdigest(), "ab" * 32
    with served(tmp_path / "simple", made, other) as url:
        pip_index(url if metadata else index(tmp_path / "files", made, stated=other))
        line = _refused(["fetch", "2.99.0"], capsys, 1, own=own[:12], other=other[:12])
    assert line == snapshot(
        "the wheel of torch 2.99.0 has sha256 <own>…, and the index states <other>…; nothing was kept; next: again"
    )
    assert _left(own_cache) == []


def test_a_release_that_the_index_does_not_have_for_a_mac_is_refused(
    tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed
) -> None:
    pip_index(index(tmp_path / "simple", *(wheel(tmp_path / "wheels", release) for release in ("2.99.0", "2.98.0"))))
    assert _refused(["fetch", "9.9"], capsys) == snapshot(
        "the package index has no macOS wheel of torch 9.9.0; the newest that it has: 2.99.0; next: pip index"
        " versions torch"
    )
    pip_index(index(tmp_path / "other", wheel(tmp_path / "wheels", platform="manylinux_2_28_x86_64")))
    assert _refused(["fetch", "2.99.0"], capsys) == snapshot(
        "the package index has no macOS wheel of torch 2.99.0; next: pip index versions torch"
    )


def test_a_constraint_of_pips_is_named(
    tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_index(index(tmp_path / "simple", wheel(tmp_path / "wheels")))
    (tmp_path / "constraints.txt").write_text("torch<=2.14.1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    assert _refused(["fetch", "2.99.0"], capsys) == snapshot(
        "pip's constraint torch<=2.14.1 excludes torch 2.99.0; next: pip config list"
    )


def test_an_index_that_cannot_be_reached_is_told_from_one_without_the_release(
    own_cache: Path, pip_index: Index, capsys: Printed
) -> None:
    pip_index("http://127.0.0.1:9/simple")
    assert _refused(["fetch", "2.99.0"], capsys, 1) == snapshot(
        "pip does not reach the package index for torch 2.99.0 (Connection refused); next: again, or hf-mps"
        " kernels fetch --wheel PATH"
    )
    assert _left(own_cache) == []


def test_an_environment_without_pip_is_told_of_the_other_way(
    own_cache: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    assert _refused(["fetch", "2.99.0"], capsys, python=sys.executable) == snapshot(
        "<python> has no pip (environments of uv have none); next: uv pip install pip, or hf-mps kernels"
        " fetch --wheel PATH"
    )


def test_what_is_no_release_is_refused_before_anything_is_asked(own_cache: Path, capsys: Printed) -> None:
    assert _refused(["fetch", "newest"], capsys) == snapshot(
        "'newest' is no release of PyTorch; allowed: a version, for example 2.13.0"
    )
    assert _refused(["fetch", "2.99.0", "--wheel", "x.whl"], capsys) == snapshot(
        "a RELEASE cannot be combined with --wheel, which is a file; give one of them"
    )
    assert not own_cache.exists()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made = wheel(tmp_path / "wheels")
    assert _refused(["fetch", "--wheel", str(made)], capsys, folder=tmp_path) == snapshot(
        "<folder>/file/hf_mps/kernels cannot be written (Not a directory); next: XDG_CACHE_HOME=FOLDER, a folder"
        " that can"
    )


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(
    tmp_path: Path, own_cache: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert _refused(["fetch", "--wheel", str(wheel(tmp_path))], capsys, 1, cache=own_cache) == snapshot(
        "<cache>: no space is left; next: room there, or XDG_CACHE_HOME=FOLDER elsewhere"
    )
    assert _left(own_cache) == []


def test_an_interrupt_removes_what_was_begun(
    tmp_path: Path, own_cache: Path, pip_index: Index, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_index(index(tmp_path / "simple", wheel(tmp_path / "wheels")))
    real = subprocess.run

    def interrupted(command: list[Any], **options: Any) -> Any:
        real(command, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    assert main(["kernels", "fetch", "2.99.0"]) == 130
    assert _left(own_cache) == []


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, own_cache: Path) -> None:
    left = own_cache / ".work-2.99.0-deadbeef"
    left.mkdir(parents=True)
    (left / "torch-2.99.0.whl").write_bytes(bytes(100))
    assert main(["kernels", "fetch", "--wheel", str(wheel(tmp_path))]) == 0
    assert _left(own_cache) == ["2.99.0"]


def test_processes_that_fetch_the_same_release_at_once_fetch_it_once(
    tmp_path: Path, own_cache: Path, pip_index: Index
) -> None:
    made = wheel(tmp_path / "wheels")
    pip_index(index(tmp_path / "simple", made))
    command = [sys.executable, "-m", "hf_mps", "kernels", "fetch", "2.99.0"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [each.communicate() for each in running]
    assert [each.returncode for each in running] == [0, 0, 0], said
    assert sum("downloading" in out for out, _ in said) == 1
    assert sum("here already" in out for out, _ in said) == 2
    assert len(store.open_library("2.99.0")) == 4
