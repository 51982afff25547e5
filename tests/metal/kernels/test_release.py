"""A kernel is compiled once: the next process reads its object file and opens nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from hf_mps.metal.kernels.release import FORGOTTEN, Release
from hf_mps.metal.kernels.values import NoRule, u32

NAME = "abs_dense_float_float"


@pytest.fixture
def opened(release: str, tmp_path: Path) -> Release:
    return of(release, tmp_path / "key")


def of(release: str, folder: Path) -> Release:
    """A release that keeps its code in a folder of the test's."""
    made = Release(release)
    made.objects.folder = folder
    return made


def right(release: Release) -> bool:
    given, out = torch.randn(10), torch.zeros(10)
    release.kernel(NAME).launch([out, given, u32(10)], threads=3)
    return torch.equal(out, given.abs())


def test_what_one_process_compiled_the_next_one_loads(opened: Release) -> None:
    assert right(opened)
    second = of(opened.version, opened.objects.folder)
    assert right(second)
    assert "library" in vars(opened)
    assert "library" not in vars(second), "the metallib was opened: the kernel was compiled again"


@pytest.mark.rotated
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-100], lambda data: data[:200], lambda data: b"", lambda data: data[:-1] + b"x"]
)
def test_a_damaged_object_file_is_compiled_anew(opened: Release, damage) -> None:
    assert right(opened)
    file = opened.objects.folder / f"{NAME}.kernel"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert right(of(opened.version, opened.objects.folder))
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_only_costs_time(opened: Release, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    opened.objects.folder = tmp_path / "file" / "key"
    assert right(opened)


def test_a_kernel_that_there_is_not_is_named(opened: Release) -> None:
    with pytest.raises(NoRule, match=f"torch {opened.version} has no kernel abs_dense_double_double"):
        opened.kernel("abs_dense_double_double")


def test_a_kernel_on_which_the_compiler_ended_two_processes_is_left_alone(opened: Release) -> None:
    gone = 2**22 + 1  # above Linux's largest number of a process
    marker = opened.objects.folder / f"{NAME}.compiling"
    marker.parent.mkdir()
    marker.write_text(f"{gone} 0")
    assert right(opened), "once may be a process that somebody killed"
    assert not marker.exists()
    marker.write_text(f"{gone} 1")
    (opened.objects.folder / f"{NAME}.kernel").unlink()
    with pytest.raises(NoRule, match=f"LLVM ended the processes that compiled {NAME}"):
        right(of(opened.version, opened.objects.folder))


def test_code_of_other_keys_goes_after_a_month(opened: Release, tmp_path: Path) -> None:
    for name, age in (("older", FORGOTTEN + 60), ("old", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert right(opened)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["key", "old"]


def test_checked_code_is_kept_apart(release: str) -> None:
    assert Release(release, checked=True).objects.folder != Release(release).objects.folder
