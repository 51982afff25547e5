"""A wheel that the user has: which are taken, and in which line the others are refused, with nothing kept of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.metal.kernels import store
from hf_mps.metal.kernels.fetch import NEXT
from tests.metal.kernels.wheels import KERNELS, library, metallib, wheel
from tests.snapshots import masked

Printed = pytest.CaptureFixture[str]


def _refused(made: Path, cache: Path, capsys: Printed) -> str:
    """The one line in which a wheel is refused; nothing may be left of it."""
    assert main(["kernels", "fetch", "--wheel", str(made)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert not cache.is_dir() or [each.name for each in cache.iterdir() if not each.name.endswith(".lock")] == []
    return masked(err.removeprefix("hf-mps: ").rstrip("\n"), wheel=made, cache=cache)


def test_a_path_may_begin_with_the_home_folder(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["kernels", "fetch", f"--wheel=~/{wheel(tmp_path).name}"]) == 0
    assert set(store.open_library("2.99.0")) == set(KERNELS)


def test_the_metallib_for_macos_14_is_taken_wherever_it_lies(tmp_path: Path, own_cache: Path) -> None:
    wanted = metallib("wanted_float", macos=14)
    for release, others in (
        ("2.98.0", (metallib("older", macos=13), wanted)),
        ("2.99.0", (wanted, metallib("n", macos=26))),
    ):
        assert main(["kernels", "fetch", "--wheel", str(wheel(tmp_path, release, dylib=library(*others)))]) == 0
        assert store.path(release).read_bytes() == wanted


def _html(folder: Path) -> Path:
    (folder / "torch.whl").write_bytes(b"<html>404</html>")
    return folder / "torch.whl"


def _broken_off(folder: Path) -> Path:
    made = wheel(folder)
    made.write_bytes(made.read_bytes()[:-100])
    return made


def _other_bytes(folder: Path) -> Path:
    made = wheel(folder)
    content = bytearray(made.read_bytes())
    content[400] ^= 0xFF
    made.write_bytes(content)
    return made


def _zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "some.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    return folder / "some.zip"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_html, "is no whole wheel (File is not a zip file)"),
        (_broken_off, "is no whole wheel (File is not a zip file)"),
        (_other_bytes, "is no whole wheel ("),
        (_zip, "is no wheel: it has no metadata"),
        (lambda folder: wheel(folder, project="torchvision"), "is a wheel of torchvision, not of torch or mlx-metal"),
        *(
            (
                partial(wheel, release="2.99.0+cu130", platform=platform),
                f"is torch 2.99.0+cu130 for {platform}, not for macOS on arm64",
            )
            for platform in ("manylinux_2_28_x86_64", "macosx_11_0_x86_64", "win_amd64")
        ),
    ],
)
def test_a_file_that_is_no_wheel_for_a_mac_is_refused(
    make: Callable[[Path], Path], problem: str, tmp_path: Path, own_cache: Path, capsys: Printed
) -> None:
    line = _refused(make(tmp_path), own_cache, capsys)
    assert line.startswith(f"<wheel> {problem}")
    assert line.endswith(f"; {NEXT}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    assert _refused(tmp_path / "torch-2.99.0.whl", own_cache, capsys) == f"there is no file <wheel>; {NEXT}"


def test_a_release_without_a_metallib_is_refused(tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    """torch 2.5.1: its kernels are Metal source, which the Mac compiles."""
    assert _refused(wheel(tmp_path, dylib=library()), own_cache, capsys) == snapshot(
        "torch 2.99.0 has no metallib for macOS 14 in its library (before 2.6 they are source that the Mac"
        " compiles); next: a newer release"
    )


def test_a_release_for_other_macos_alone_is_refused(tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    made = wheel(tmp_path, dylib=library(metallib("a", macos=26), metallib("a", macos=27)))
    assert _refused(made, own_cache, capsys) == snapshot(
        "torch 2.99.0 has no metallib for macOS 14 in its library (only for 26, 27); next: a newer release"
    )


def test_a_list_of_kernels_that_makes_no_sense_is_refused(tmp_path: Path, own_cache: Path, capsys: Printed) -> None:
    made = metallib(*KERNELS).replace(b"MDSZ", b"XXXX")
    assert _refused(wheel(tmp_path, dylib=library(made)), own_cache, capsys) == snapshot(
        "the metallib of torch 2.99.0 cannot be read (the list of kernels cannot be read: KeyError(b'MDSZ')); next:"
        " another wheel of it"
    )
