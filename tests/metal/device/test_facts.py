"""Facts of the device: the same on a Mac and on the simulated one, each dtype with its reason."""

from __future__ import annotations

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal.device import facts, machine, precision
from hf_mps.metal.device.facts import Facts
from tests.metal.device.machines import GIB, MAC


def test_the_device_of_this_suite_describes_itself() -> None:
    here = facts.facts("mps")
    assert here.device == "mps"
    assert here.chip.startswith("Apple M")
    assert here.cores is not None
    assert here.cores > 0
    assert here.recommended is not None
    assert GIB < here.recommended < here.memory
    assert here.macos is not None


def test_the_facts_read_as_lines() -> None:
    here = Facts("mps", "Apple M2", 10, 16 * GIB, 11 * GIB, "15.6")
    assert here.lines() == snapshot(
        ["device: mps, Apple M2, 10 GPU cores", "memory: 16.0 GiB, of which 11.0 GiB recommended", "system: macOS 15.6"]
    )


def test_each_dtype_has_its_reason() -> None:
    dtypes = precision.dtypes("mps")
    assert dtypes["float32"].reason == snapshot("every Metal GPU computes it")
    assert not dtypes["float64"].value
    assert dtypes["float64"].reason == snapshot(
        "Metal has no float64 at all; use float32, and convert numpy columns before they reach the device"
    )


@pytest.mark.parametrize(
    ("chip", "emulated"), [("Apple M1", True), ("Apple M2 Ultra", True), ("Apple M3 Pro", False), ("Apple M10", False)]
)
def test_bfloat16_is_emulated_on_m1_and_m2(chip: str, emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: chip)
    reason = "emulates it in float32, so it saves memory only" if emulated else "computes it"
    assert str(precision.dtypes("mps")["bfloat16"]) == f"True ({chip} {reason})"


def test_the_cpu_has_no_float16_training() -> None:
    dtypes = precision.dtypes("cpu")
    assert {name: usable.value for name, usable in dtypes.items()} == {
        "float32": True,
        "float16": False,
        "bfloat16": True,
        "float64": True,
    }


def test_the_facts_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_overridden", MAC)
    here = facts.facts("cpu")
    assert (here.chip, here.cores, here.memory, here.recommended) == ("Apple M2", None, 16 * GIB, None)
