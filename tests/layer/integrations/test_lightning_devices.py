"""What Lightning's `accelerator=` and `devices=` meant on another device is said on the device of the switch."""

from __future__ import annotations

import pytest

from hf_mps.layer.integrations import lightning


class CUDAAccelerator:
    """Named as Lightning names its own."""


@pytest.mark.parametrize(
    ("accelerator", "name"), [("gpu", "gpu"), (None, "None"), (CUDAAccelerator, "cuda"), (CUDAAccelerator(), "cuda")]
)
def test_an_accelerator_is_known_by_word_class_or_object(accelerator: object, name: str) -> None:
    assert lightning._name(accelerator) == name


@pytest.mark.parametrize(
    ("devices", "processes"),
    [("auto", "auto"), (2, 2), ("2", "2"), (-1, "auto"), ("-1", "auto"), ([0], 1), ([0, 3], 2), ("0,3", 2), ("0,", 1)],
)
def test_gpus_become_processes_on_the_cpu(devices: object, processes: object) -> None:
    assert lightning._processes(devices) == processes


@pytest.mark.parametrize(
    ("devices", "becomes", "told"),
    [("auto", "auto", False), (1, 1, False), ([2], 1, False), (-1, 1, False), (4, 1, True), ("0,1", 1, True)],
)
def test_there_is_one_metal_device(
    devices: object, becomes: object, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(lightning, "print_notice", lines.append)
    assert lightning._one(devices) == becomes
    assert lines == ([f"HF_MPS_DEVICE=mps: devices={devices!r} becomes 1, there is one Metal device"] if told else [])
