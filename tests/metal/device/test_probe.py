"""Each way in which Metal can be absent has a sentence of its own, and only a right product lets it be taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal.device import probe
from hf_mps.metal.device.machine import Machine
from hf_mps.metal.device.probe import Readings, verdict
from tests import modes
from tests.metal.device.machines import LINUX, MAC

TOO_MUCH = (
    "MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: 7.93 GB). "
    "Tried to allocate 256 bytes on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
)


def right() -> bool:
    return True


def wrong() -> bool:
    return False


def refused() -> bool:
    raise RuntimeError(TOO_MUCH)


def never() -> bool:
    raise AssertionError("the device was used although it cannot be there")


def reading(
    here: Machine, *, built: bool = True, found: bool = True, trial: Callable[[], bool] = never
) -> tuple[bool, str]:
    choice = verdict(Readings(here, "2.13.0", built, found, trial))
    return choice.value, choice.reason


INTEL = replace(MAC, processor="x86_64", chip="Intel(R) Core(TM) i7")
VIRTUAL = replace(MAC, virtual=True)
NEW_ENOUGH = (
    "is new enough and PyTorch has Metal, but this process sees no Metal GPU, as in a sandbox or outside a "
    "login session; see what the Mac has: system_profiler SPDisplaysDataType"
)


def broken() -> bool:
    raise RuntimeError("Failed to create the command queue.\nat MPSStream.mm:12")


ABSENT: dict[str, tuple[Machine, dict[str, Any], str]] = {
    "Linux": (
        LINUX,
        {"built": False},
        "this is Linux, not a Mac, and PyTorch 2.13.0 is built without Metal; "
        "for a simulated Metal device: HF_MPS_SIMULATE=1",
    ),
    "a torch without Metal": (
        MAC,
        {"built": False},
        "PyTorch 2.13.0 is built without Metal, though this is a Mac with Apple M2; "
        "install the official build: pip install --force-reinstall torch",
    ),
    "an Intel Mac": (
        INTEL,
        {"built": False},
        "this Mac has an Intel processor and PyTorch 2.13.0 is built without Metal; "
        "PyTorch publishes no such build for it any more; to train on the CPU: HF_MPS_DEVICE=cpu",
    ),
    **{
        f"macOS {version}": (
            replace(MAC, macos=version),
            {"found": False},
            f"macOS {version} is too old: PyTorch's Metal backend needs macOS 14.0 or newer; "
            f"look for an update: softwareupdate --list",
        )
        for version in ("13.7.4", "10.16")
    },
    **{
        f"macOS {version} without a GPU": (
            replace(MAC, macos=version),
            {"found": False},
            f"macOS {version} {NEW_ENOUGH}",
        )
        for version in ("14.0", "26.0.1")
    },
    "a virtual machine without a GPU": (
        VIRTUAL,
        {"found": False},
        "this is a virtual machine that offers no Metal GPU; to train on the CPU: HF_MPS_DEVICE=cpu",
    ),
    "a virtual machine where every allocation fails": (
        VIRTUAL,
        {"trial": refused},
        f"this is a virtual machine whose Metal GPU fails at its first use (RuntimeError: {TOO_MUCH}), "
        f"as hosted runners do (actions/runner-images#9918); to train on the CPU: HF_MPS_DEVICE=cpu",
    ),
    "a GPU that fails, by the first line of its error": (
        MAC,
        {"trial": broken},
        "the Metal GPU of Apple M2 fails at its first use (RuntimeError: Failed to create the command queue); "
        "to train on the CPU: HF_MPS_DEVICE=cpu",
    ),
    "a wrong product": (
        MAC,
        {"trial": wrong},
        "a matrix product computed on Apple M2's Metal GPU differs from the CPU's, so its results cannot be trusted; "
        "look for a system update: softwareupdate --list",
    ),
}


@pytest.mark.parametrize("case", ABSENT)
def test_each_way_to_be_without_metal_has_a_sentence_with_the_next_step(case: str) -> None:
    here, read, sentence = ABSENT[case]
    assert reading(here, **read) == (False, sentence)


def test_an_older_torch_is_named_with_the_next_command() -> None:
    assert reading(MAC, trial=right) == (True, "Metal passed its probe on Apple M2, macOS 15.6")
    found = verdict(Readings(MAC, "2.12.1", True, True, right))
    assert (found.value, found.reason) == (
        True,
        snapshot(
            "Metal passed its probe on Apple M2, macOS 15.6; "
            "torch 2.12.1 is older than 2.13: wrong results are known; next: pip install -U torch"
        ),
    )


@pytest.mark.parametrize("built", [True, False])
def test_rosetta_is_named_before_everything_else_with_the_next_command(
    built: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    translated = replace(MAC, processor="x86_64", rosetta=True)
    sentence = (
        "this Python is an x86-64 build that runs under Rosetta on Apple M2, where PyTorch has no Metal; "
        "make an arm64 environment: "
    )
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert reading(translated, built=built, found=False) == (False, sentence + "arch -arm64 python3 -m venv metal")
    (tmp_path / "conda-meta").mkdir()
    command = "CONDA_SUBDIR=osx-arm64 conda create -n metal python=3.12"
    assert reading(translated, built=built, found=False) == (False, sentence + command)


def test_the_probe_computes_on_the_device_of_this_suite() -> None:
    assert probe._trial()
    assert probe.metal(owned=True).value, probe.metal().reason


def test_the_probe_runs_once_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_known", None)
    calls = []
    monkeypatch.setattr(probe, "_trial", lambda: calls.append(1) or True)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    assert [probe.metal(owned=True).value for _ in range(3)] == [True] * 3
    assert calls == [1]


def test_a_wrong_product_on_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.Tensor.cpu
    monkeypatch.setattr(probe, "_known", None)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: stock(tensor) + 1)
    assert not probe.metal(owned=True).value
    assert "differs from the CPU's" in probe.metal().reason


def test_the_probe_leaves_the_random_numbers_and_the_callers_modes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_known", None)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    states = torch.get_rng_state(), torch.mps.get_rng_state()
    with modes.Refusing(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        passed = probe.metal(owned=True)
    assert passed.value, passed.reason
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.mps.get_rng_state())
